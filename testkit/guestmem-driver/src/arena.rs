use std::fs::File;
use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, compiler_fence};

use guestmem::area::Area;
use guestmem::guest::RegionSpec;
use guestmem::region::Region;

/// Size of a huge page of x86-64, in bytes.
#[cfg(not(miri))]
const HUGE_PAGE_LEN: usize = 2 << 20;

/// Size of an ordinary page of x86-64, in bytes: what `/proc/self/pagemap` counts in.
#[cfg(not(miri))]
const BASE_PAGE_LEN: u64 = 4096;

/// Memory of a guest: a memfd, mapped here as the guest and its VMM would have it.
///
/// # Example
/// ```
/// use guestmem_driver::Arena;
/// use guestmem::guest::{GuestMemory, Range};
///
/// let arena = Arena::new(1 << 20)?;
/// let memory = GuestMemory::with_regions(vec![arena.region(0x4000_0000)?])?;
/// let offset = arena.allocate(5, 1);
/// arena.write(offset, b"hello");
///
/// let mut copy = [0; 5];
/// memory.read(&[Range { address: 0x4000_0000 + offset as u64, len: 5 }], 0, &mut copy)?;
/// assert_eq!(&copy, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Arena {
    file: File,
    /// The mapping here, whose start plays guest address zero.
    region: Arc<Region>,
    allocated: AtomicUsize,
}

impl Arena {
    /// An arena of `size` bytes, all zero.
    pub fn new(size: usize) -> io::Result<Arena> {
        if size == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let (file, frontend_address) = backing::create(size)?;
        Arena::from_file(file, frontend_address, size)
    }

    /// An arena of one huge page, which lies in one piece in the machine's memory and stays where it is: a device of this machine can be given its
    /// [physical address](Arena::physical_address). The system must have a huge page to spare (`/proc/sys/vm/nr_hugepages`).
    #[cfg(not(miri))]
    pub fn huge_page() -> io::Result<Arena> {
        let (file, frontend_address) = backing::create_huge(HUGE_PAGE_LEN)?;
        Arena::from_file(file, frontend_address, HUGE_PAGE_LEN)
    }

    /// Where the beginning of the arena lies in this machine's memory.
    ///
    /// # Errors
    /// When the system does not say, which it says to the administrator only (Linux, Documentation/admin-guide/mm/pagemap.rst).
    #[cfg(not(miri))]
    pub fn physical_address(&self) -> io::Result<u64> {
        use std::os::unix::fs::FileExt;

        // A page that was never touched is nowhere.
        self.write(0, &[0]);
        let mut entry = [0; 8];
        let place = self.base() / BASE_PAGE_LEN * 8;
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, place)?;
        let entry = u64::from_le_bytes(entry);
        let (present, number) = (entry >> 63 == 1, entry & ((1 << 55) - 1));
        if !present || number == 0 {
            return Err(io::Error::from(io::ErrorKind::PermissionDenied));
        }
        Ok(number * BASE_PAGE_LEN)
    }

    fn from_file(file: File, frontend_address: u64, size: usize) -> io::Result<Arena> {
        let spec = RegionSpec {
            guest_address: 0,
            size: size as u64,
            frontend_address,
            file: file.try_clone()?,
            file_offset: 0,
        };
        let region = Arc::new(Region::map(spec).map_err(io::Error::other)?);
        Ok(Arena {
            file,
            region,
            allocated: AtomicUsize::new(0),
        })
    }

    /// The memfd.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// In bytes.
    pub fn size(&self) -> usize {
        self.region.size() as usize
    }

    /// The whole arena as a region, for a device: with a descriptor of its own, and the mapping here as the front end's.
    pub fn region(&self, guest_address: u64) -> io::Result<RegionSpec> {
        self.part(guest_address, 0, self.size())
    }

    /// A part of the arena as a region: `len` bytes from `offset` on, which must be a multiple of the page size.
    pub fn part(&self, guest_address: u64, offset: usize, len: usize) -> io::Result<RegionSpec> {
        Ok(RegionSpec {
            guest_address,
            size: len as u64,
            frontend_address: self.base() + offset as u64,
            file: self.file.try_clone()?,
            file_offset: offset as u64,
        })
    }

    /// Where the arena is mapped here: its front-end address.
    pub fn base(&self) -> u64 {
        self.place(0, 0).expose_provenance() as u64
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// If they do not fit into the arena.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let place = self.place(offset, bytes.len());
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the place is mapped for that many bytes, and private memory is elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        compiler_fence(Ordering::SeqCst);
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// If they are not all in the arena.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let place = self.place(offset, into.len());
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the place is mapped for that many bytes, and private memory is elsewhere.
        unsafe { ptr::copy_nonoverlapping(place, into.as_mut_ptr(), into.len()) };
        compiler_fence(Ordering::SeqCst);
    }

    /// The offset of `len` bytes not given out before, at a multiple of `align`. They are never given back.
    ///
    /// # Panics
    /// When the arena is used up.
    pub fn allocate(&self, len: usize, align: usize) -> usize {
        let mut offset = 0;
        let advanced =
            self.allocated
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |allocated| {
                    offset = allocated.next_multiple_of(align);
                    offset.checked_add(len).filter(|end| *end <= self.size())
                });
        assert!(
            advanced.is_ok(),
            "an arena of {} bytes has no {len} left",
            self.size()
        );
        offset
    }

    /// The area of `len` bytes from `offset` on, for fields of a queue.
    pub(crate) fn area(&self, offset: usize, len: usize) -> Area {
        let address = self.region.frontend_address() + offset as u64;
        Area::new(&self.region, address, len, 2).expect("what was allocated is inside the arena")
    }

    fn place(&self, offset: usize, len: usize) -> *mut u8 {
        let size = self.size();
        assert!(
            offset <= size && size - offset >= len,
            "{len} bytes at {offset} in an arena of {size}"
        );
        let (start, _) = self
            .region
            .at_frontend(self.region.frontend_address())
            .expect("a region is not empty");
        // SAFETY: the offset lies inside the mapping, or at its end.
        unsafe { start.as_ptr().add(offset) }
    }
}

#[cfg(not(miri))]
mod backing {
    use std::fs::File;
    use std::io;

    use rustix::fs::{MemfdFlags, memfd_create};

    /// A file, and the front-end address to map it with.
    pub(crate) fn create(size: usize) -> io::Result<(File, u64)> {
        create_with(size, MemfdFlags::CLOEXEC)
    }

    /// The same of huge pages.
    pub(crate) fn create_huge(size: usize) -> io::Result<(File, u64)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        create_with(size, flags)
    }

    fn create_with(size: usize, flags: MemfdFlags) -> io::Result<(File, u64)> {
        let file = File::from(memfd_create("arena", flags)?);
        file.set_len(size as u64)?;
        Ok((file, 0))
    }
}

/// See the mapping of regions: under Miri, all of it is ordinary memory of one process. It is never freed.
#[cfg(miri)]
mod backing {
    use std::fs::File;
    use std::io;

    pub(crate) fn create(size: usize) -> io::Result<(File, u64)> {
        let pages: &'static mut [u128] = vec![0_u128; size.div_ceil(16)].leak();
        Ok((
            File::open("/dev/null")?,
            pages.as_mut_ptr().expose_provenance() as u64,
        ))
    }
}
