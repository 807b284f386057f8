//! The filter in the language of BPF, of which it needs three words: load a field of `seccomp_data`, compare, return.

use std::io;

use super::{Supervision, Watched, When};

/// What the kernel calls the architecture of this program: `AUDIT_ARCH_…` of linux/audit.h.
pub(super) const ARCHITECTURE: Option<u32> = if cfg!(target_arch = "x86_64") {
    Some(0xc000_003e)
} else if cfg!(target_arch = "aarch64") {
    Some(0xc000_00b7)
} else if cfg!(target_arch = "riscv64") {
    Some(0xc000_00f3)
} else {
    None
};

/// The filter for these calls.
///
/// Arguments are loaded only once the number is that of a watched call. So the kernel sees of every other number that it always passes, and does not run the filter for it.
pub(super) fn program(supervision: &Supervision<'_>) -> io::Result<Vec<libc::sock_filter>> {
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    let architecture = ARCHITECTURE.ok_or(io::ErrorKind::Unsupported)?;
    // Arguments have eight bytes each, and the machines above are little-endian. Those that are compared are ints.
    let low_half = |place: u8| 16 + 8 * u32::from(place);
    let high_half = |place| low_half(place) + 4;
    let pass = give(libc::SECCOMP_RET_ALLOW);
    let mut program = vec![load(ARCH), compare(architecture, 1, 0), pass];
    for missing in supervision.missing {
        program.extend([
            load(NUMBER),
            compare(missing.number(), 0, 1),
            give(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        ]);
    }
    for Watched { call, when } in supervision.watched {
        let mut conditions = Vec::new();
        match when {
            When::Always => {}
            When::Are(values) => {
                for (index, (place, value)) in values.iter().enumerate() {
                    // Behind this one there are two words for each that is left, and the one that stops. The lists have few.
                    let rest = 2 * (values.len() - index - 1) + 1;
                    let comparison = compare(*value, 0, rest as u8);
                    conditions.extend([load(low_half(*place)), comparison]);
                }
            }
            When::Points(place) => conditions.extend([
                load(low_half(*place)),
                compare(0, 0, 2),
                load(high_half(*place)),
                compare(0, 1, 0),
            ]),
        }
        let len = conditions.len() as u8;
        program.extend([load(NUMBER), compare(call.number(), 0, len + 1)]);
        program.extend(conditions);
        program.push(give(libc::SECCOMP_RET_USER_NOTIF));
    }
    program.push(pass);
    Ok(program)
}

/// One word of a filter: what it does, with what, and how many words it skips if a comparison is true, or is not.
fn word(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

fn load(offset: u32) -> libc::sock_filter {
    word(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

fn compare(value: u32, jt: u8, jf: u8) -> libc::sock_filter {
    word(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, jt, jf)
}

fn give(action: u32) -> libc::sock_filter {
    word(libc::BPF_RET | libc::BPF_K, action, 0, 0)
}
