//! The environment variables that a launcher sets for its ranks.

/// Rank of this process, from 0.
pub const RANK: &str = "RANK";
/// Number of ranks in the run.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Rank among the ranks on this machine; also the index of its GPU.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of ranks on this machine.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Address of the launcher's socket, `unix:PATH`.
pub const MGPU_RENDEZVOUS: &str = "MGPU_RENDEZVOUS";
/// Identifier of the run, and the token with which a rank joins it. Under another launcher the user may set it, to the
/// same value for all ranks of a run, as the name of their rendezvous.
pub const MGPU_RUN_ID: &str = "MGPU_RUN_ID";
/// How often the launcher has restarted the ranks, from 0.
pub const MGPU_RESTART_COUNT: &str = "MGPU_RESTART_COUNT";
/// `cpu` or `nccl`.
pub const MGPU_BACKEND: &str = "MGPU_BACKEND";
/// `1` if the launcher shows progress lines (lines that end in a carriage return) because it writes to a terminal.
pub const MGPU_PROGRESS: &str = "MGPU_PROGRESS";
/// Faults to inject, in the syntax of `mgpurun --inject`, separated by semicolons.
pub const MGPU_INJECT: &str = "MGPU_INJECT";
/// Timeout of one operation that waits for a peer, in seconds (default 300).
pub const MGPU_TIMEOUT: &str = "MGPU_TIMEOUT";
/// Index of the rank's GPU among those that it sees, if that is not `LOCAL_RANK`: 0 under `mgpurun --isolate-gpus`, which
/// shows each rank only its own GPU.
pub const MGPU_DEVICE: &str = "MGPU_DEVICE";
/// `1` if several ranks may use one GPU, as under `mgpurun --share-gpus`.
pub const MGPU_SHARE_GPUS: &str = "MGPU_SHARE_GPUS";
/// `always` if a single rank opens NCCL too and sends its gradients through it. Set by the user, for tests of NCCL on a
/// machine with one GPU; otherwise a single rank does not need NCCL.
pub const MGPU_NCCL: &str = "MGPU_NCCL";
/// `off` if NCCL does not access gradients in place but copies them (default: `auto`). Set by the user, the same on all
/// ranks.
pub const MGPU_NCCL_REGISTER: &str = "MGPU_NCCL_REGISTER";
/// For ranks that another launcher has started on several hosts, if they do not reach each other on the interface that NCCL
/// takes: `check` (the default) makes that an error, with `set` the ranks set `NCCL_SOCKET_IFNAME`, `off` does not check.
/// Set by the user.
pub const MGPU_NCCL_PREFLIGHT: &str = "MGPU_NCCL_PREFLIGHT";
/// What ranks of different hosts use: `tcp`, `ucx`, or `auto` (the default): UCX if all hosts have it and an RDMA device.
/// Set by the launcher to its choice.
pub const MGPU_NET: &str = "MGPU_NET";
/// Number of threads a rank should use: its share of the cores. Set by the launcher unless the user has set it.
pub const MGPU_THREADS: &str = "MGPU_THREADS";
/// The same for OpenMP programs; set for such programs unless the user has set it, not used by the runtime.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// Host of a PyTorch script's own rendezvous; set for such scripts, not used by the runtime.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Free port for a PyTorch script's own rendezvous; set for such scripts, not used by the runtime.
pub const MASTER_PORT: &str = "MASTER_PORT";

/// Exit code of a rank that has stopped on request, at the same place as all others, so that the run can be resumed there.
pub const EXIT_STOPPED: u8 = 74;

/// Maximum number of ranks on one host: more than any machine has cores or GPUs for.
pub const MAX_RANKS: u32 = 4096;
/// Maximum number of ranks of a job on several hosts.
pub const MAX_WORLD_RANKS: u32 = 65_536;

/// A fresh identifier of a run: 128 random bits as 32 hexadecimal digits.
///
/// # Errors
/// If the system has no source of randomness.
pub fn new_run_id() -> crate::Result<String> {
    use std::io::Read;
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| crate::Error::system("read random bytes from /dev/urandom", error))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn run_ids_are_128_bits_and_differ() {
        let ids = [super::new_run_id().unwrap(), super::new_run_id().unwrap()];
        assert!(ids.iter().all(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit())));
        assert_ne!(ids[0], ids[1]);
    }
}
