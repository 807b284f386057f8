//! `[[vm.channel]]`.

use super::*;

fn channels(text: &str) -> Result<Vec<Channel<ChardevRequest>>, ConfigError> {
    let config = file(&format!("[[vm]]\nname = \"web\"\n{text}"))?;
    Ok(config.vms[0].value.channels.clone())
}

#[test]
fn a_channel_is_read_with_its_defaults() {
    let text = r#"
        [[vm.channel]]
        name = "org.example.Log_1"
        to = "unix:collector"
        [[vm.channel]]
        name = "b"
        listen = "b.port"
        to = "listen:b.sock"
        [[vm.channel]]
        name = "c"
        connect = "/run/c.port"
        command = ["/usr/bin/cat", "-n"]
        [[vm.channel]]
        name = "d"
        to = "file:/var/log/d"
        max-bytes = 4096
        [[vm.channel]]
        install-log = true
        "#;
    let found = channels(text).unwrap();
    let channel = |name: &str, chardev, target| Channel {
        name: name.to_owned(),
        chardev,
        target,
    };
    let listen = || ChardevRequest::Listen(None);
    assert_eq!(
        found,
        [
            channel(
                "org.example.Log_1",
                listen(),
                ChannelTarget::Unix("/etc/ringdown/collector".into())
            ),
            channel(
                "b",
                ChardevRequest::Listen(Some("/etc/ringdown/b.port".into())),
                ChannelTarget::Listen("/etc/ringdown/b.sock".into())
            ),
            channel(
                "c",
                ChardevRequest::Connect("/run/c.port".into()),
                ChannelTarget::Command(vec!["/usr/bin/cat".to_owned(), "-n".to_owned()])
            ),
            channel(
                "d",
                listen(),
                ChannelTarget::File {
                    path: "/var/log/d".into(),
                    max_bytes: 4096
                }
            ),
            channel(
                INSTALL_LOG_PORT,
                listen(),
                ChannelTarget::InstallLog {
                    max_bytes: DEFAULT_MAX_BYTES
                }
            ),
        ]
    );
    let config = file(&format!("[[vm]]\nname = \"web\"\n{text}")).unwrap();
    let plan = Plan::from_config("/run/ringdown".into(), &config, Cids::default()).unwrap();
    let first = &plan.get("web").unwrap().channels[0];
    let default = Path::new("/run/ringdown/web.org.example.Log_1.channel");
    assert_eq!(first.chardev, Chardev::Listen(default.to_owned()));
}

#[test]
fn each_channel_that_cannot_be_meant_is_refused_with_its_remedy() {
    let name = |name: &str| format!("name = \"{name}\"\nto = \"file:/x\"");
    let table = [
        (
            "to = \"file:/x\"".to_owned(),
            "this [[vm.channel]] has no \"name\"",
        ),
        (name(""), "is not the name of a channel"),
        (name("a b"), "is not the name of a channel"),
        (name(".."), "not starting with '.'"),
        (name("a/b"), "is not the name of a channel"),
        (name(&"a".repeat(64)), "use 1 to 63"),
        (name(AGENT_PORT), "Ringdown's agent uses this one"),
        (
            "name = \"a\"".to_owned(),
            "needs exactly one of to, command, install-log, and has none",
        ),
        (
            "name = \"a\"\nto = \"file:/x\"\ninstall-log = true".to_owned(),
            "and has several",
        ),
        (
            "name = \"a\"\nto = \"tcp:/x\"".to_owned(),
            "write \"unix:PATH\", \"listen:PATH\" or \"file:PATH\"",
        ),
        (
            "name = \"a\"\nto = \"unix:/x\"\nmax-bytes = 4096".to_owned(),
            "\"max-bytes\" means nothing where nothing is written to a file",
        ),
        (
            "name = \"a\"\nto = \"file:/x\"\nmax-bytes = 4095".to_owned(),
            "max-bytes cannot be 4095",
        ),
        (
            "name = \"a\"\nto = \"file:/x\"\nlisten = \"/a\"\nconnect = \"/b\"".to_owned(),
            "\"connect\" means nothing beside \"listen\"",
        ),
        (
            "name = \"a\"\ncommand = [\"cat\"]".to_owned(),
            "give it from the root",
        ),
        (
            "name = \"a\"\nlisen = \"/a\"".to_owned(),
            "did you mean \"listen\"?",
        ),
    ];
    for (text, expected) in table {
        let found = channels(&format!("[[vm.channel]]\n{text}"))
            .expect_err(expected)
            .to_string();
        assert!(found.contains(expected), "{text}\n{found}");
        assert!(found.starts_with("ringdown.toml: line "), "{found}");
    }
    let twice = format!("[[vm.channel]]\n{0}\n[[vm.channel]]\n{0}", name("a"));
    let found = channels(&twice).unwrap_err().to_string();
    assert!(found.contains("the channel \"a\""), "{found}");
    assert!(channels(&format!("[[vm.channel]]\n{}", name(&"a".repeat(63)))).is_ok());
}

#[test]
fn a_vm_has_so_many_channels_and_no_more() {
    let table = |index: usize| format!("[[vm.channel]]\nname = \"c{index}\"\nto = \"file:/x\"\n");
    let text = |count: usize| (0..count).map(table).collect::<String>();
    assert_eq!(channels(&text(MAX_CHANNELS)).unwrap().len(), MAX_CHANNELS);
    let found = channels(&text(MAX_CHANNELS + 1)).unwrap_err().to_string();
    assert!(
        found.contains("too many channels of one VM: at most 16"),
        "{found}"
    );
}

#[test]
fn the_sockets_of_channels_belong_to_nobody_else() {
    let table = [
        (
            "[[vm.channel]]\nname = \"a\"\nlisten = \"/x\"\nto = \"file:/f\"\n\
             [[vm.channel]]\nname = \"b\"\nlisten = \"/x\"\nto = \"file:/f\"",
            "is used by another channel of this VM already",
        ),
        (
            "[[vm.channel]]\nname = \"a\"\nlisten = \"/x\"\nto = \"listen:/x\"",
            "is used by another channel of this VM already",
        ),
        (
            "[[vm.channel]]\nname = \"a\"\nlisten = \"/run/ringdown/web.sock\"\nto = \"file:/f\"",
            "is used by this VM's host socket already",
        ),
        (
            "[[vm.channel]]\nname = \"a\"\nto = \"listen:/x\"\nlisten = \"/y\"\n[[vm]]\nname = \"db\"\nhost = \"/x\"",
            "is used by VM \"web\" already",
        ),
    ];
    for (text, expected) in table {
        let config = file(&format!("[[vm]]\nname = \"web\"\n{text}")).unwrap();
        let planned = Plan::from_config("/run/ringdown".into(), &config, Cids::default());
        let found = planned.expect_err(expected).to_string();
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn a_file_belongs_to_one_channel_by_whatever_path_it_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    std::fs::create_dir(root.join("logs")).unwrap();
    std::os::unix::fs::symlink("logs", root.join("link")).unwrap();
    std::fs::write(root.join("there"), "").unwrap();
    std::fs::hard_link(root.join("there"), root.join("other")).unwrap();
    std::fs::write(root.join("ringdown.toml"), "").unwrap();
    let read = |paths: [&str; 2], more: &str| {
        let channel = |vm, path| {
            format!(
                "[[vm]]\nname = \"{vm}\"\n[[vm.channel]]\nname = \"log\"\nto = \"file:{}/{path}\"\n",
                root.display()
            )
        };
        let mut config = file(&format!(
            "{more}\n{}{}",
            channel("a", paths[0]),
            channel("b", paths[1])
        ))?;
        config.files.push(root.join("ringdown.toml"));
        check_whole(&config)
    };
    let audit = format!("audit = \"{}/logs/audit\"", root.display());
    let of_a = "belongs to the channel \"log\" of VM \"a\" already";
    for (paths, expected) in [
        (["logs/f", "logs/f"], of_a),
        (["logs/f", "logs/f.1"], of_a),
        (["logs/f.1", "logs/f"], of_a),
        (["logs/f", "logs/../logs/f"], of_a),
        (["logs/f", "link/f.1"], of_a),
        (["there", "other"], of_a),
        (["logs/f", "link/audit"], "belongs to the audit already"),
        (
            ["ringdown.toml", "f"],
            "belongs to the configuration already",
        ),
    ] {
        let found = read(paths, &audit).expect_err(expected).to_string();
        assert!(found.contains(expected), "{paths:?}: {found}");
        assert!(found.starts_with("ringdown.toml: line "), "{found}");
    }
    for paths in [
        ["logs/f", "f"],
        ["logs/f", "logs/f.2"],
        ["logs/f", "logs/F"],
    ] {
        read(paths, &audit).unwrap();
    }
    let domains = "[[vm]]\nname = \"red.web\"\n[[vm.channel]]\ninstall-log = true\n\
                   [[vm]]\nname = \"web\"\ndomain = \"red\"\nvhost-user = \"/a\"\nhost = \"/b\"\n\
                   [[vm.channel]]\ninstall-log = true\nlisten = \"/c\"";
    check_whole(&file(domains).unwrap()).unwrap();
}
