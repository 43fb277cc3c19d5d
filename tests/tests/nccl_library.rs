//! The real NCCL, as far as it works without a GPU: found among Python's packages, it creates a unique id, which the
//! rendezvous sends to the other ranks.

use std::collections::BTreeSet;

use mgpu_tests::process::{command, run};

#[test]
fn ranks_receive_the_unique_id_of_the_real_library() {
    if let Err(error) = nccl_sys::Library::open() {
        println!("skipped: {}", error.summary());
        return;
    }
    let launch = || {
        let mut launcher = command(env!("CARGO_BIN_EXE_t-mgpurun"));
        launcher.args(["-n", "3", "--no-prefix", env!("CARGO_BIN_EXE_t-unique-id")]);
        let finished = run(launcher.env("NCCL_SOCKET_IFNAME", "lo"));
        finished.expect(0, &["NCCL 2."]);
        let ids = finished.stdout.lines().filter_map(|line| line.strip_prefix("id "));
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        assert_eq!(ids.len(), 3, "{finished:#?}");
        ids.into_iter().collect::<BTreeSet<String>>()
    };
    let (first, second) = (launch(), launch());
    assert_eq!((first.len(), second.len()), (1, 1), "all ranks have the same id");
    assert_ne!(first, second, "every run has its own");
}
