//! What other ways of copying would bring between guests: prefetching, non-temporal stores, the string instruction, and pages of 2 MiB.
//! Source and target are walked through as rings of packets are, so that they stay in a cache or not as real ones would.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::ptr;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Memory for packets, in pages of the usual size or of 2 MiB.
struct Mapped {
    start: *mut u8,
    len: usize,
}

impl Mapped {
    fn new(len: usize, huge: bool) -> Mapped {
        let len = len.next_multiple_of(2 << 20);
        // Longer than needed, so that it can begin at a huge page.
        // SAFETY: a new mapping touches nothing that is there.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len + (2 << 20),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        let skip = start.align_offset(2 << 20);
        let start = start.wrapping_byte_add(skip).cast::<u8>();
        let advice = if huge {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: the range lies in the mapping just made.
        unsafe { libc::madvise(start.cast(), len, advice) };
        // SAFETY: as above; it is writable, and not shared.
        unsafe { ptr::write_bytes(start, 7, len) };
        Mapped { start, len }
    }

    fn at(&self, position: usize, len: usize) -> *mut u8 {
        let places = self.len / len;
        self.start.wrapping_add(position % places * len)
    }
}

/// Copies `len` bytes, a multiple of 64, between two places aligned to 64 that do not overlap.
type Copy = unsafe fn(*const u8, *mut u8, usize);

unsafe fn usual(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(from, to, len) };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    /// As `ptr::copy`, page by page, with the next page on its way.
    pub(super) unsafe fn prefetching(from: *const u8, to: *mut u8, len: usize) {
        let mut done = 0;
        while done < len {
            let step = (len - done).min(4096);
            let next = from.wrapping_add(done + step);
            for line in 0..(len - done - step).min(4096) / 64 {
                // SAFETY: a prefetch reads nothing that the program could see, whatever the address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line * 64).cast()) };
            }
            let (from, to) = (from.wrapping_add(done), to.wrapping_add(done));
            // SAFETY: the caller's promise, for a part of what it was made for.
            unsafe { std::ptr::copy(from, to, step) };
            done += step;
        }
    }

    /// Past the caches.
    pub(super) unsafe fn non_temporal(from: *const u8, to: *mut u8, len: usize) {
        for offset in (0..len).step_by(16) {
            let from = from.wrapping_add(offset).cast::<__m128i>();
            // SAFETY: the caller's promise: the length is a multiple of 16.
            let sixteen = unsafe { _mm_loadu_si128(from) };
            let to = to.wrapping_add(offset).cast::<__m128i>();
            // SAFETY: as above, and 16 divides the target's alignment.
            unsafe { _mm_stream_si128(to, sixteen) };
        }
        // SAFETY: a fence touches no memory.
        unsafe { _mm_sfence() };
    }

    /// `rep movsb`.
    pub(super) unsafe fn string(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise; the direction flag is clear, as the calling convention has it.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
                options(nostack, preserves_flags));
        }
    }
}

fn copies(criterion: &mut Criterion) {
    let mut ways: Vec<(&str, Copy)> = vec![("memmove", usual)];
    #[cfg(target_arch = "x86_64")]
    ways.extend([
        ("prefetching", x86::prefetching as Copy),
        ("non-temporal", x86::non_temporal as Copy),
        ("rep movsb", x86::string as Copy),
    ]);
    // What a guest's window of credit moves through; what a ring of 128 packets of 64 KiB may; and what no cache holds.
    for (place, bytes) in [
        ("256 KiB", 256 << 10),
        ("8 MiB", 8 << 20),
        ("256 MiB", 256 << 20),
    ] {
        for huge in [false, true] {
            let (from, to) = (Mapped::new(bytes, huge), Mapped::new(bytes, huge));
            let pages = if huge { "2 MiB" } else { "4 KiB" };
            let mut group = criterion.benchmark_group(format!("copy in {place}, pages of {pages}"));
            for len in [512, 4096, 65536] {
                group.throughput(Throughput::Bytes(len as u64));
                for (name, way) in &ways {
                    let mut position = 0;
                    group.bench_function(format!("{name}, {len} bytes"), |bencher| {
                        bencher.iter(|| {
                            // SAFETY: both places are inside their mappings, aligned, and apart.
                            unsafe {
                                way(
                                    black_box(from.at(position, len)),
                                    black_box(to.at(position, len)),
                                    len,
                                );
                            }
                            position += 1;
                        });
                    });
                }
            }
            group.finish();
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().without_plots();
    targets = copies
}
criterion_main!(benches);
