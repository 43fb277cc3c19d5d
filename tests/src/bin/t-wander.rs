//! A rank that leaves its process group for its launcher's and ignores SIGTERM. Then it creates the file it is given.

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getpgid, getppid, setpgid};

fn main() {
    let mut stubborn = SigSet::empty();
    stubborn.add(Signal::SIGTERM);
    stubborn.thread_block().expect("SIGTERM can be blocked");
    let group = getpgid(Some(getppid())).expect("a launcher has a group");
    setpgid(Pid::from_raw(0), group).expect("a group of the same session can be joined");
    println!("wandered");
    let file = std::env::args().nth(1).expect("a file to create");
    std::fs::write(file, "").expect("the file can be created");
    loop {
        std::thread::park();
    }
}
