//! Rank 0 creates a unique id with the real NCCL, and all ranks read it from the rendezvous. Prints the id, the address in
//! it, at which NCCL listens on rank 0, and whether this rank reaches it. Needs no GPU.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use mgpu::World;
use nccl_sys::{Library, UniqueId};

const KEY: &str = "unique-id";
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match exchange() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn exchange() -> Result<(), Box<dyn std::error::Error>> {
    let world = World::from_env()?;
    let store = world.store().ok_or("started without a launcher")?;
    if world.rank() == 0 {
        let nccl = Library::open()?;
        println!("NCCL {} from {}", nccl.version()?, nccl.origin());
        let id = nccl.unique_id()?;
        store.set(KEY, id.as_bytes(), &[], world.size())?;
    }
    let (bytes, _) = store.get(KEY, 0, PATIENCE)?;
    let bytes: [u8; UniqueId::LEN] = bytes.try_into().map_err(|_| "an id of another length")?;
    let id: String =
        UniqueId::from_bytes(bytes).as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("id {id}");
    let address = address(&bytes).ok_or("an id without an address")?;
    println!("NCCL listens at {}", address.ip());
    if world.rank() > 0 {
        TcpStream::connect_timeout(&address, PATIENCE)?;
        println!("reached {}", address.ip());
    }
    // NCCL listens until rank 0 ends.
    Ok(store.barrier("reached", PATIENCE)?)
}

/// The address in an id: a socket address of the kernel behind a number of 8 bytes.
fn address(id: &[u8]) -> Option<SocketAddr> {
    let [family, port] = [8, 10].map(|at| [id[at], id[at + 1]]);
    let ip: IpAddr = match i32::from(u16::from_ne_bytes(family)) {
        nix::libc::AF_INET => <[u8; 4]>::try_from(&id[12..16]).ok()?.into(),
        nix::libc::AF_INET6 => <[u8; 16]>::try_from(&id[16..32]).ok()?.into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes(port)))
}
