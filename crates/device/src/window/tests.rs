use std::os::unix::fs::PermissionsExt;

use super::*;

const UUID: [u8; 16] = *b"0123456789abcdef";
const MIB: u64 = 1 << 20;

fn bytes(window: &WindowFile, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    window.file.file().read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn number(block: &[u8], at: usize, len: usize) -> u64 {
    let digits = block[at..at + len].iter().rev();
    digits.fold(0, |all, byte| all << 8 | u64::from(*byte))
}

#[test]
fn a_holder_of_a_descriptor_cannot_keep_a_window_from_being_renewed() {
    let window = WindowFile::sealed(UUID, 16 * MIB).unwrap();
    let theirs = window.descriptor().unwrap();
    rustix::fs::fcntl_setfl(&theirs, OFlags::APPEND).unwrap();
    window.renew().unwrap();
}

#[test]
fn the_info_block_says_what_the_kernel_checks() {
    let window = WindowFile::sealed(UUID, 16 * MIB).unwrap();
    let block = bytes(&window, 4096, 4096);
    assert_eq!(&block[..16], b"NVDIMM_DAX_INFO\0");
    assert_eq!(&block[16..32], &UUID);
    assert_eq!(&block[32..52], &[0; 20], "parent and flags");
    assert_eq!((number(&block, 52, 2), number(&block, 54, 2)), (1, 4));
    assert_eq!(number(&block, 56, 8), 2 * MIB, "dataoff");
    assert_eq!(number(&block, 64, 8), 14 * MIB / 4096, "npfns");
    assert_eq!(number(&block, 72, 4), 1, "mode");
    assert_eq!(number(&block, 76, 8), 0, "start_pad and end_trunc");
    assert_eq!(number(&block, 84, 4), 2 * MIB, "align");
    assert_eq!((number(&block, 88, 4), number(&block, 92, 2)), (4096, 64));
    assert!(block[94..4088].iter().all(|byte| *byte == 0));
    // Worked out here in the kernel's words: both sums over words of 32 bits, the second one in 64.
    let (mut low, mut high) = (0_u32, 0_u64);
    for word in block[..4088].chunks(4) {
        low = low.wrapping_add(number(word, 0, 4) as u32);
        high += u64::from(low);
    }
    // The two words of the checksum itself count as zeros.
    high += 2 * u64::from(low);
    assert_eq!(number(&block, 4088, 8), high << 32 | u64::from(low));
}

#[test]
fn a_known_info_block_has_its_known_checksum() {
    // What another program (Python, by the same definition) computed for this UUID and 16 MiB.
    let block = info_block(UUID, 16 * MIB);
    assert_eq!(number(&block, 4088, 8), KNOWN_CHECKSUM);
}

const KNOWN_CHECKSUM: u64 = 0x3d0a_b09f_0ac5_646b;

#[test]
fn lengths_have_bounds() {
    for len in [8 * MIB, 10 * MIB, 16 * MIB, 1024 * MIB] {
        assert!(is_len(len), "{len}");
    }
    for len in [
        0,
        6 * MIB,
        8 * MIB - 1,
        8 * MIB + 4096,
        9 * MIB,
        1026 * MIB,
        u64::MAX,
    ] {
        assert!(!is_len(len), "{len}");
        let error = WindowFile::sealed(UUID, len).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

#[test]
fn rings_are_as_long_as_fits_and_as_is_asked_for() {
    let most = u64::MAX;
    assert_eq!(ring_len(8 * MIB, most), Some(2 * MIB));
    assert_eq!(ring_len(16 * MIB, most), Some(4 * MIB));
    assert_eq!(ring_len(20 * MIB, most), Some(8 * MIB));
    assert_eq!(ring_len(20 * MIB - 1, most), Some(4 * MIB));
    assert_eq!(ring_len(1024 * MIB, most), Some(256 * MIB));
    assert_eq!(ring_len(16 * MIB, 4 * MIB), Some(4 * MIB));
    assert_eq!(ring_len(16 * MIB, 4 * MIB - 1), Some(2 * MIB));
    assert_eq!(ring_len(16 * MIB, 4096), Some(4096));
    assert_eq!(ring_len(16 * MIB, 4095), None);
    assert_eq!(ring_len(16 * MIB, 0), None);
    assert_eq!(ring_len(4 * MIB, most), None);
}

#[test]
fn a_sealed_window_keeps_its_length() {
    let window = WindowFile::sealed(UUID, 8 * MIB).unwrap();
    assert!(window.is_sealed());
    for len in [0, 8 * MIB - 4096, 8 * MIB + 4096] {
        window.file.set_len(len).unwrap_err();
    }
    let seal = rustix::fs::fcntl_add_seals(window.file.file(), SealFlags::WRITE);
    seal.unwrap_err();
}

#[test]
fn nothing_of_an_earlier_life_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let windows = [
        WindowFile::sealed(UUID, 8 * MIB).unwrap(),
        WindowFile::at(&directory.path().join("w"), UUID, 8 * MIB).unwrap(),
    ];
    for window in windows {
        let before = bytes(&window, 0, (8 * MIB) as usize);
        window
            .file
            .file()
            .write_all_at(&vec![0xa5; (8 * MIB) as usize], 0)
            .unwrap();
        window.renew().unwrap();
        assert!(bytes(&window, 0, (8 * MIB) as usize) == before);
        let used = before.iter().filter(|byte| **byte != 0).count();
        assert!(used < 100, "{used} bytes are set in an empty window");
    }
}

#[test]
fn an_ordinary_window_is_its_owners_and_takes_its_room_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.0");
    let window = WindowFile::at(&path, UUID, 8 * MIB).unwrap();
    assert!(!window.is_sealed());
    let metadata = window.file.file().metadata().unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert_eq!(metadata.len(), 8 * MIB);
    assert!(metadata.blocks() * 512 >= 8 * MIB);
    // Truncated, it comes back as it was.
    window.file.set_len(0).unwrap();
    window.renew().unwrap();
    assert_eq!(window.file.file().metadata().unwrap().len(), 8 * MIB);
    // A second opening finds the same file, with the name that it is given.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    let again = WindowFile::at(&path, [7; 16], 10 * MIB).unwrap();
    let found = again.file.file().metadata().unwrap();
    assert_eq!(found.ino(), metadata.ino());
    assert_eq!(
        (found.len(), found.permissions().mode() & 0o777),
        (10 * MIB, 0o600)
    );
    assert_eq!(bytes(&window, 4096 + 16, 16), [7; 16]);
}

#[test]
fn what_is_no_file_of_ours_is_not_taken_for_a_window() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("target"), b"precious").unwrap();
    std::os::unix::fs::symlink(at("target"), at("symlink")).unwrap();
    std::fs::hard_link(at("target"), at("link")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    std::fs::create_dir(at("directory")).unwrap();
    for name in ["symlink", "link", "pipe", "directory"] {
        WindowFile::at(&at(name), UUID, 8 * MIB).unwrap_err();
    }
    assert_eq!(std::fs::read(at("target")).unwrap(), b"precious");
}

#[test]
fn a_life_is_what_its_parties_are_told() {
    let window = WindowFile::sealed(UUID, 16 * MIB).unwrap();
    let life = Life {
        generation: 7,
        nonce: [9; 16],
        ring_len: ring_len(16 * MIB, u64::MAX).unwrap(),
        has_records: true,
    };
    window.format(&life).unwrap();
    let spec = WindowSpec {
        identity: Identity {
            generation: 7,
            nonce: [9; 16],
        },
        kind: Kind::Records,
        ring_len: 4 * MIB,
        page_len: PAGE_LEN,
    };
    Window::attach(window.file.file(), DATA_OFFSET, &spec).unwrap();
    // The next life has none of it.
    window.renew().unwrap();
    Window::attach(window.file.file(), DATA_OFFSET, &spec).unwrap_err();
    let too_long = Life {
        ring_len: 8 * MIB,
        ..life
    };
    window.format(&too_long).unwrap_err();
}
