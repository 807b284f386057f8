//! Attacks while the configuration changes: tests of other crates, since they need a daemon that is reloaded all the time.

/// An attack while configurations follow each other.
pub struct AtReload {
    /// What is tried.
    pub what: &'static str,
    /// What must come of it.
    pub outcome: &'static str,
    /// The tests that try it: the file below the project's directory, and the function.
    pub tests: &'static [(&'static str, &'static str)],
}

/// All of them.
pub const AT_RELOAD: &[AtReload] = &[
    AtReload {
        what: "calls without pause at a service while its target, and who may call it, change: to be judged by one configuration and reach the target of another",
        outcome: "no call reaches the other target",
        tests: &[
            (
                "crates/daemon/tests/reload.rs",
                "a_call_that_one_configuration_allows_never_reaches_the_target_of_another",
            ),
            (
                "crates/device/tests/hybrid/change.rs",
                "a_call_is_judged_and_put_through_by_one_configuration",
            ),
            (
                "crates/hostside/tests/proxy/reload.rs",
                "a_call_is_put_through_to_what_was_offered_when_it_was_made",
            ),
        ],
    },
    AtReload {
        what: "calls of a VM that is added together with the rule that denies it, and removed with it: to be there without the rule",
        outcome: "no call is put through",
        tests: &[
            (
                "crates/daemon/tests/reload.rs",
                "a_vm_that_comes_and_goes_with_the_rule_that_denies_it_is_never_without_that_rule",
            ),
            (
                "crates/daemon/tests/reload.rs",
                "a_vm_that_is_added_and_removed_by_hand_is_never_without_its_aliases",
            ),
        ],
    },
    AtReload {
        what: "a call in the ring of a VM that is removed: to be judged when the VM's name and groups are gone",
        outcome: "it is not judged",
        tests: &[(
            "fuzz/tests/fabric.rs",
            "a_call_in_the_ring_of_a_vm_that_goes",
        )],
    },
    AtReload {
        what: "a connection of egress that is open when its VM leaves the group that may have it; a call from before, whose destination is named after",
        outcome: "it ends with `--enforce-existing`; both configurations have to allow it",
        tests: &[
            (
                "crates/hostside/tests/proxy/reload.rs",
                "who_has_left_a_group_loses_what_the_group_may_reach",
            ),
            (
                "crates/hostside/tests/proxy/reload.rs",
                "a_call_from_before_a_reload_gets_no_more_than_both_configurations_allow",
            ),
        ],
    },
    AtReload {
        what: "a connection that came in by a published port which is published otherwise by the time it is judged",
        outcome: "it is dropped",
        tests: &[(
            "crates/device/tests/hybrid/change.rs",
            "who_came_in_by_a_port_that_is_no_longer_published_reaches_nobody",
        )],
    },
    AtReload {
        what: "calls of a service, and in a UDP session from before, at an address at which a reload publishes a port: to be taken for a caller from outside",
        outcome: "none reaches the port",
        tests: &[
            (
                "crates/hostside/tests/proxy/publish.rs",
                "no_guest_waits_at_a_port_before_it_is_published",
            ),
            (
                "crates/hostside/tests/proxy/publish.rs",
                "a_session_from_before_a_port_is_published_there_ends",
            ),
        ],
    },
    AtReload {
        what: "frames without pause between two VMs that swap their VLANs, or of which one is isolated in either configuration: to share a VLAN, or be open, for a moment",
        outcome: "no frame passes",
        tests: &[
            (
                "bench/tests/net_reload.rs",
                "guests_that_swap_their_vlans_never_share_one",
            ),
            (
                "bench/tests/net_reload.rs",
                "guests_of_which_one_is_isolated_never_reach_each_other_while_it_becomes_the_other",
            ),
        ],
    },
];

/// The section of the page.
pub(super) fn section() -> String {
    let mut section = String::from(
        "\n# While the configuration changes\n\n\
        These are tests of their own, in which a daemon is reloaded all the time; `attacks` checks that they are there.\n\n\
        | What is tried | What must come of it | Tests |\n|---|---|---|\n",
    );
    for attack in AT_RELOAD {
        let tests = attack.tests.iter();
        let tests: Vec<String> = tests
            .map(|(file, test)| format!("`{test}` ({file})"))
            .collect();
        section.push_str(&format!(
            "| {} | {} | {} |\n",
            attack.what,
            attack.outcome,
            tests.join(", ")
        ));
    }
    section
}
