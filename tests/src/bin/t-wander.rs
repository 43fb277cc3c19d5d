//! A rank that leaves its process group for its launcher's and ignores SIGTERM.

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getpgid, getppid, setpgid};

fn main() {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let group = getpgid(Some(getppid())).expect("a launcher has a group");
    setpgid(Pid::from_raw(0), group).expect("a group of the same session can be joined");
    println!("wandered");
    loop {
        std::thread::park();
    }
}
