//! The kernel inside a bzImage, as VMMs without a BIOS boot it (Documentation/arch/x86/boot.rst in the Linux sources).

use std::io::Read;

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Where a bzImage says how many sectors come before the protected-mode code, less one.
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
/// Where the packed kernel begins, from the protected-mode code on, and its length: 32 bits each.
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR_BYTES: usize = 512;

/// The longest kernel that is accepted after unpacking, in bytes.
const LIMIT_BYTES: u64 = 256 * 1024 * 1024;

/// Unpacks the ELF file.
pub fn vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    ensure!(
        image.get(MAGIC..MAGIC + 4) == Some(b"HdrS"),
        "the kernel is no bzImage"
    );
    let sectors = usize::from(image[SETUP_SECTORS]) + 1;
    let begin = sectors * SECTOR_BYTES + number(image, PAYLOAD_OFFSET)?;
    // The last four bytes are the length of what was packed.
    let end = (begin + number(image, PAYLOAD_LENGTH)?).saturating_sub(4);
    let payload = image
        .get(begin..end)
        .context("the kernel ends before its payload")?;
    let mut kernel = Vec::new();
    match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            liblzma::read::XzDecoder::new(payload)
                .take(LIMIT_BYTES)
                .read_to_end(&mut kernel)?;
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            ruzstd::StreamingDecoder::new(payload)
                .map_err(|error| anyhow!("the kernel's payload is damaged: {error}"))?
                .take(LIMIT_BYTES)
                .read_to_end(&mut kernel)?;
        }
        _ => bail!("the kernel is packed neither with xz nor with zstd"),
    }
    ensure!(
        kernel.starts_with(b"\x7fELF"),
        "what the kernel unpacks is no ELF file"
    );
    Ok(kernel)
}

fn number(image: &[u8], at: usize) -> Result<usize> {
    let bytes = image
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .context("the kernel is too short")?;
    Ok(u32::from_le_bytes(bytes) as usize)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn image(kernel: &[u8]) -> Vec<u8> {
        let mut packer = liblzma::write::XzEncoder::new(Vec::new(), 0);
        packer.write_all(kernel).unwrap();
        let mut packed = packer.finish().unwrap();
        packed.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
        let mut image = vec![0; 2 * SECTOR_BYTES];
        image[SETUP_SECTORS] = 1;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        let gap = 16_u32;
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&gap.to_le_bytes());
        let length = u32::try_from(packed.len()).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.resize(image.len() + 16, 0);
        image.extend(packed);
        image.extend(b"behind it");
        image
    }

    #[test]
    fn the_kernel_is_what_was_packed() {
        let kernel = b"\x7fELF and more".repeat(1000);
        assert_eq!(vmlinux(&image(&kernel)).unwrap(), kernel);
    }

    #[test]
    fn what_is_no_kernel_is_an_error() {
        assert!(vmlinux(b"").is_err());
        assert!(vmlinux(&[0; 4096]).is_err());
        assert!(vmlinux(&image(b"no ELF file")).is_err());
        let kernel = image(b"\x7fELF");
        assert!(vmlinux(&kernel[..kernel.len() - 60]).is_err());
    }
}
