//! A rank that joins with a given manifest: `t-hello VERSION WORLD_SIZE GPU DRIVER NCCL`, each a comma-separated list
//! with an entry per rank (`-` for none). The manifests are invented; no GPU is used.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use mgpu_control::rendezvous::message::{Manifest, Request, encode};

fn main() -> ExitCode {
    let variable = |name| std::env::var(name).expect("started by mgpurun");
    let rank: u32 = variable("RANK").parse().expect("RANK is a number");
    let own = |position: usize| {
        let list = std::env::args().nth(position).expect("five lists");
        list.split(',').nth(rank as usize).expect("an entry for each rank").to_owned()
    };
    let some = |position| Some(own(position)).filter(|text| text != "-");
    let hello = Request::Hello {
        version: own(1).parse().expect("VERSION is a number"),
        run_id: variable("MGPU_RUN_ID"),
        rank,
        world_size: own(2).parse().expect("WORLD_SIZE is a number"),
        pid: std::process::id(),
        manifest: Manifest { gpu: some(3), driver: some(4), nccl: some(5), shares_gpu: false },
    };
    let path = variable("MGPU_RENDEZVOUS").replace("unix:", "");
    let mut stream = UnixStream::connect(path).expect("the launcher answers");
    stream.write_all(&encode(&hello)).expect("the launcher reads");
    let mut reply = Vec::new();
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("the launcher replies");
    reply.resize(u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut reply).expect("a whole reply");
    println!("{}", String::from_utf8_lossy(&reply));
    if reply.windows(7).any(|window| window == b"welcome") { ExitCode::SUCCESS } else { ExitCode::from(9) }
}
