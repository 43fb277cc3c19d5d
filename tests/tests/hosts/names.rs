//! How nodes find each other: late names, addresses of one family, addresses that lead nowhere.

use mgpu_tests::hosts::{Hosts, address, address_v6};

use super::job::{Job, STEPS, expect_all};

/// The names of both hosts, with these addresses of each.
fn names(addresses: impl Fn(usize) -> Vec<String>) -> String {
    let lines = ["a", "b"].into_iter().enumerate().flat_map(|(host, name)| {
        addresses(host).into_iter().map(move |address| format!("{address} {name}\n"))
    });
    lines.chain(["127.0.0.1 localhost\n".to_owned()]).collect()
}

/// The ranks join, and all-reduce from host to host.
#[track_caller]
fn expect_success(hosts: &Hosts) {
    let finished = Job::start(hosts, &["-n", "2"], &[STEPS]).finish();
    expect_all(&finished, 0, &["life 0"]);
}

#[test]
fn a_name_that_appears_late_is_asked_for_again() {
    let Some(hosts) = Hosts::start(2) else { return };
    hosts.set_names(1, "127.0.0.1 localhost\n");
    let job = Job::start(&hosts, &["-n", "1"], &["echo", "found"]);
    // It runs.
    job.mgpuruns(1);
    hosts.set_names(1, &names(|host| vec![address(host)]));
    expect_all(&job.finish(), 0, &["found"]);
}

#[test]
fn a_name_that_does_not_appear_is_an_error_that_names_it() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::new(&hosts);
    let options = ["-n", "1", "--rdzv-endpoint", "nowhere.invalid:29400", "--timeout", "1"];
    job.add(1, &options, &["true"]);
    job.finish()[0].expect(64, &["nowhere.invalid"]);
}

#[test]
fn hosts_with_addresses_of_one_family_find_each_other() {
    let Some(hosts) = Hosts::start(2) else { return };
    for host in 0..2 {
        hosts.ip(host, &format!("address del {}/24 dev eth0\n", address(host)));
        hosts.set_names(host, &names(|host| vec![address_v6(host)]));
    }
    expect_success(&hosts);

    let Some(hosts) = Hosts::start(2) else { return };
    for host in 0..2 {
        let script = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6";
        assert!(hosts.command(host, "sh").args(["-c", script]).status().unwrap().success());
        hosts.set_names(host, &names(|host| vec![address(host)]));
    }
    expect_success(&hosts);
}

/// Every machine with Docker has a network of this address.
#[test]
fn an_address_that_both_hosts_have_is_used_by_neither() {
    let Some(hosts) = Hosts::start(2) else { return };
    for host in 0..2 {
        hosts.ip(
            host,
            "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n",
        );
    }
    expect_success(&hosts);
}

#[test]
fn addresses_that_lead_nowhere_are_tried_beside_those_that_do() {
    let Some(hosts) = Hosts::start(2) else { return };
    let text = names(|host| vec!["10.99.0.77".into(), "fd99::77".into(), address(host)]);
    hosts.set_names(1, &text);
    expect_success(&hosts);
}
