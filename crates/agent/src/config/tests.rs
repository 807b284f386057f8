use super::*;

#[test]
fn without_a_file_everything_is_allowed() {
    let config = Config::default();
    for (_, capability) in METHODS {
        assert_eq!(config.allow(capability), Ok(()));
    }
    assert_eq!(Config::parse(""), Ok(config));
}

#[test]
fn each_method_can_be_switched_off_by_itself() {
    for (key, capability) in METHODS {
        let config = Config::parse(&format!("[methods]\n{key} = false\n")).unwrap();
        assert_eq!(config, Config::default().without(key));
        for (_, other) in METHODS {
            assert_eq!(config.allow(other).is_ok(), other != capability, "{other}");
        }
        let words = config.allow(capability).unwrap_err();
        assert!(
            words.contains(DEFAULT_PATH) && words.contains(key),
            "{words}"
        );
    }
    let config = Config::parse("[methods]\nexec = true\n").unwrap();
    assert_eq!(config, Config::default());
}

#[test]
fn what_cannot_be_meant_is_refused_with_what_would_be_right() {
    for (text, expected) in [
        ("[method]", "did you mean \"methods\""),
        ("[methods]\nexce = false", "did you mean \"exec\""),
        ("[methods]\nClipboard = false", "did you mean \"clipboard\""),
        ("[methods]\nfrobnicate = false", "there are exec, cp"),
        ("[methods]\nexec = 0", "expected true or false"),
        ("methods = false", "write [methods]"),
        ("[time]\nsynk = true", "did you mean \"sync\""),
        ("[time]\nsync = \"yes\"", "expected true or false"),
        (
            "[time]\nthreshold-milliseconds = 9",
            "expected 10 to 86400000",
        ),
        (
            "[time]\nthreshold-milliseconds = 86400001",
            "expected 10 to",
        ),
        ("[methods", "TOML parse error"),
    ] {
        let words = Config::parse(text).unwrap_err();
        assert!(words.contains(expected), "{text}: {words}");
    }
}

#[test]
fn the_clock_is_configured() {
    let time = |text: &str| Config::parse(text).unwrap().time;
    let threshold = |millis| TimeConfig {
        sync: true,
        threshold: Duration::from_millis(millis),
    };
    assert_eq!(time(""), threshold(1000));
    assert_eq!(time("[time]\nthreshold-milliseconds = 10"), threshold(10));
    assert_eq!(
        time("[time]\nthreshold-milliseconds = 86_400_000"),
        threshold(86_400_000)
    );
    assert!(!time("[time]\nsync = false").sync);
}

#[test]
fn a_file_that_was_named_must_be_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.toml");
    assert!(matches!(
        Config::read(Some(&path)),
        Err(ConfigError::Read { .. })
    ));
    std::fs::write(&path, "[methods]\npower = false\n").unwrap();
    let config = Config::read(Some(&path)).unwrap();
    let words = config.allow("power").unwrap_err();
    assert!(words.contains(path.to_str().unwrap()), "{words}");
    std::fs::write(&path, vec![b' '; MAX_LEN as usize]).unwrap();
    assert!(Config::read(Some(&path)).is_ok());
    std::fs::write(&path, vec![b' '; MAX_LEN as usize + 1]).unwrap();
    let error = Config::read(Some(&path)).unwrap_err().to_string();
    assert!(error.contains("longer than"), "{error}");
}
