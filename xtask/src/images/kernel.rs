//! A kernel as QEMU starts it without unpacking: what a `bzImage` has in it, where that has an entry for PVH. The code in front of it unpacks
//! itself and the kernel at each boot, on the guest's processor.

use std::io::Read;

use anyhow::{Context, Result, anyhow, bail, ensure};
use goblin::elf::Elf;

/// The type of the note in which a kernel says where PVH enters it (`XEN_ELFNOTE_PHYS32_ENTRY`), and its name.
const PVH_ENTRY: (&str, u32) = ("Xen", 18);

/// Where the header of Linux's boot protocol begins to have what is used here, and its magic number and version.
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const VERSION: usize = 0x206;
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LEN: usize = 0x24c;

/// The first version that says where the payload is.
const LEAST_VERSION: u32 = 0x208;

const SECTOR_LEN: usize = 512;

/// The most that a block of LZ4's older format unpacks to, which is what the kernel's build writes.
const LZ4_BLOCK_LEN: usize = 8 * 1024 * 1024;

const LZ4_MAGIC: &[u8] = &[0x02, 0x21, 0x4c, 0x18];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const XZ_MAGIC: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];

/// The longest kernel that is accepted after unpacking, in bytes: a bound for damaged files.
const KERNEL_LIMIT_BYTES: usize = 256 * 1024 * 1024;

/// The kernel in this image; the image itself where that has none that can be started so.
///
/// # Errors
/// When the image is damaged.
pub fn unpacked(image: Vec<u8>) -> Result<Vec<u8>> {
    let Some(packed) = payload(&image)? else {
        return Ok(image);
    };
    let kernel = match packed {
        _ if packed.starts_with(LZ4_MAGIC) => unpack_lz4(packed)?,
        _ if packed.starts_with(ZSTD_MAGIC) => {
            let decoder = ruzstd::StreamingDecoder::new(packed)
                .map_err(|error| anyhow!("the kernel is damaged: {error}"))?;
            read_all(decoder)?
        }
        _ if packed.starts_with(XZ_MAGIC) => read_all(liblzma::read::XzDecoder::new(packed))?,
        _ => return Ok(image),
    };
    Ok(match has_pvh_entry(&kernel)? {
        true => kernel,
        false => image,
    })
}

/// What is packed in an image, without the length that is behind it.
fn payload(image: &[u8]) -> Result<Option<&[u8]>> {
    let (at, magic) = MAGIC;
    if image.get(at..at + magic.len()) != Some(magic)
        || number(image, VERSION)? & 0xffff < LEAST_VERSION
    {
        return Ok(None);
    }
    let sectors = match image[SETUP_SECTORS] {
        0 => 4,
        count => usize::from(count),
    };
    let start = (sectors + 1) * SECTOR_LEN + number(image, PAYLOAD_OFFSET)? as usize;
    let len = number(image, PAYLOAD_LEN)? as usize;
    let payload = image.get(start..).and_then(|rest| rest.get(..len));
    let payload = payload.and_then(|payload| payload.get(..len.checked_sub(4)?));
    payload.context("the kernel is cut off").map(Some)
}

/// Blocks, each behind its length.
fn unpack_lz4(packed: &[u8]) -> Result<Vec<u8>> {
    let (mut kernel, mut rest) = (Vec::new(), &packed[LZ4_MAGIC.len()..]);
    while !rest.is_empty() {
        let len = number(rest, 0)? as usize;
        let block = rest[4..].get(..len).context("the kernel is cut off")?;
        kernel.extend(lz4_flex::block::decompress(block, LZ4_BLOCK_LEN)?);
        ensure!(
            kernel.len() <= KERNEL_LIMIT_BYTES,
            "the kernel is too large"
        );
        rest = &rest[4 + len..];
    }
    Ok(kernel)
}

fn read_all(packed: impl Read) -> Result<Vec<u8>> {
    let mut kernel = Vec::new();
    let limit = KERNEL_LIMIT_BYTES as u64 + 1;
    packed
        .take(limit)
        .read_to_end(&mut kernel)
        .context("the kernel is damaged")?;
    if kernel.len() > KERNEL_LIMIT_BYTES {
        bail!("the kernel is too large");
    }
    Ok(kernel)
}

fn has_pvh_entry(kernel: &[u8]) -> Result<bool> {
    let elf = Elf::parse(kernel).context("the kernel is damaged")?;
    let notes = elf
        .iter_note_headers(kernel)
        .into_iter()
        .flatten()
        .flatten();
    Ok(notes
        .into_iter()
        .any(|note| (note.name, note.n_type) == PVH_ENTRY))
}

/// Of four bytes, the lowest first.
fn number(bytes: &[u8], at: usize) -> Result<u32> {
    let bytes = bytes.get(at..at + 4).context("the kernel is cut off")?;
    Ok(u32::from_le_bytes(bytes.try_into()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of this payload.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR_LEN];
        image[SETUP_SECTORS] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[VERSION..VERSION + 2].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&7_u32.to_le_bytes());
        let len = (payload.len() + 4) as u32;
        image[PAYLOAD_LEN..PAYLOAD_LEN + 4].copy_from_slice(&len.to_le_bytes());
        image.extend([0; 7]);
        image.extend(payload);
        image.extend([0; 4]);
        image
    }

    fn lz4(blocks: &[&[u8]]) -> Vec<u8> {
        let mut packed = LZ4_MAGIC.to_vec();
        for block in blocks {
            let block = lz4_flex::block::compress(block);
            packed.extend((block.len() as u32).to_le_bytes());
            packed.extend(block);
        }
        packed
    }

    /// An ELF file of 64 bits with one note.
    fn kernel(note: u32) -> Vec<u8> {
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(16, 0);
        elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
        elf.extend([0, 64, 0].map(u64::to_le_bytes).concat());
        elf.extend([0; 4]);
        elf.extend([64_u16, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat());
        elf.extend([4_u32, 4].map(u32::to_le_bytes).concat());
        elf.extend([120_u64, 0, 0, 20, 20, 4].map(u64::to_le_bytes).concat());
        elf.extend([4, 4, note].map(u32::to_le_bytes).concat());
        elf.extend(b"Xen\0\0\0\0\x01");
        elf
    }

    #[test]
    fn a_kernel_with_an_entry_for_pvh_is_unpacked() {
        let kernel = kernel(PVH_ENTRY.1);
        let (begin, end) = kernel.split_at(50);
        assert_eq!(unpacked(image(&lz4(&[begin, end]))).unwrap(), kernel);
    }

    #[test]
    fn what_cannot_be_started_unpacked_stays() {
        let images = [
            image(&lz4(&[&kernel(17)])),
            image(b"packed by another program"),
            b"no image".to_vec(),
        ];
        for image in images {
            assert_eq!(unpacked(image.clone()).unwrap(), image);
        }
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let whole = image(&lz4(&[&kernel(PVH_ENTRY.1)]));
        for len in 0x206..whole.len() {
            assert!(unpacked(whole[..len].to_vec()).is_err(), "{len}");
        }
        let mut long = lz4(&[b"kernel"]);
        long[4] = 200;
        assert!(unpacked(image(&long)).is_err());
        for magic in [ZSTD_MAGIC, XZ_MAGIC, LZ4_MAGIC] {
            let damaged = [magic, b"damaged"].concat();
            assert!(unpacked(image(&damaged)).is_err());
        }
    }
}
