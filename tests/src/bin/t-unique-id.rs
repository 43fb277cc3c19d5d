//! Rank 0 creates a unique id with the real NCCL, and all ranks read it from the rendezvous. Prints the id. Needs no
//! GPU.

use std::process::ExitCode;
use std::time::Duration;

use mgpu::World;
use nccl_sys::{Library, UniqueId};

const KEY: &str = "unique-id";

fn main() -> ExitCode {
    match exchange() {
        Ok(id) => {
            println!("id {id}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn exchange() -> Result<String, Box<dyn std::error::Error>> {
    let world = World::from_env()?;
    let store = world.store().ok_or("started without a launcher")?;
    if world.rank() == 0 {
        let nccl = Library::open()?;
        println!("NCCL {} from {}", nccl.version()?, nccl.origin());
        let id = nccl.unique_id()?;
        store.set(KEY, id.as_bytes(), &[], world.size())?;
    }
    let (bytes, _) = store.get(KEY, 0, Duration::from_secs(30))?;
    let bytes: [u8; UniqueId::LEN] = bytes.try_into().map_err(|_| "an id of another length")?;
    Ok(UniqueId::from_bytes(bytes).as_bytes().iter().map(|byte| format!("{byte:02x}")).collect())
}
