//! The section of `docs/attacks.md` about attacks from inside a guest.

use super::{all, kernel};

/// The heading with which the section begins.
const HEADING: &str = "\n# From inside a guest\n";

/// The page without the section, and the section, which is empty when there is none.
pub fn split(page: &str) -> (&str, &str) {
    page.split_at(page.find(HEADING).unwrap_or(page.len()))
}

/// The section, made from the tables.
pub fn section() -> String {
    let mut section = format!(
        "{HEADING}\n\
        Made from the tables in `e2e/src/hostile`; the test `attacks_from_inside` compares the two and runs every row in a guest that\n\
        QEMU has booted: `cargo test -p ringdown-e2e --test attacks_from_inside`. While each attack lasts, another guest exchanges\n\
        checked data with the host; afterwards the daemon must be alive and at rest, its memory within bounds, no descriptor left\n\
        behind, and a fresh driver, the kernel's own, or a fresh VM must work on the attacker's line.\n\n\
        ## With the kernel's sockets\n\n\
        Root in the guest uses what its kernel offers. It may have no effect on others.\n\n\
        | Attack | What is done |\n|---|---|\n"
    );
    for attack in kernel::ATTACKS {
        section.push_str(&format!("| `{}` | {} |\n", attack.name, attack.what));
    }
    section.push_str(
        "\n## With a driver of its own\n\n\
        Root in the guest takes the device from the kernel, maps its registers, and drives it from user space.\n\n\
        | Group | Attack | What is done | What must come of it |\n|---|---|---|---|\n",
    );
    for attack in all() {
        section.push_str(&format!(
            "| {:?} | `{}` | {} | {} |\n",
            attack.group, attack.name, attack.what, attack.outcome
        ));
    }
    section
}
