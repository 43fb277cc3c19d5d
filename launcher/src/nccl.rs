//! The environment variables that configure NCCL.
//!
//! If all ranks are on this machine, they bootstrap over its loopback interface and need no network. (The payload does not
//! use this interface; it goes from GPU to GPU.) On several nodes NCCL chooses an interface itself (`mgpu_control::nccl`), unless
//! that one turns out to lead nowhere.
//!
//! By default NCCL refuses several ranks on one GPU: kernels of two ranks that wait for each other may never run at the
//! same time. With few thread blocks per kernel they do run together, slowly. So this is for tests on machines with one
//! GPU, never for timings.
//!
//! Up to version 2.29 NCCL compares host and device. Ranks with different host ids pass this check, and then
//! communicate over sockets, because they do not use the connections between GPUs of one host. Since 2.30 there is a
//! variable that allows it.

use mgpu_control::nccl::interfaces::{FAMILY_VARIABLE, INTERFACE_VARIABLE};
use nccl_sys::{Library, Version};

/// First version with a variable that allows it.
const SWITCH: Version = Version { major: 2, minor: 30, patch: 0 };

/// The version of the NCCL that ranks will load, if they find one.
pub(crate) fn version() -> Option<Version> {
    Library::open().ok()?.version().ok()
}

/// The variables of every rank if all are on one host.
pub(crate) fn on_one_host() -> Vec<(&'static str, String)> {
    vec![(INTERFACE_VARIABLE, "lo".to_owned())]
}

/// Additional variables of `rank` if ranks share a GPU.
pub(crate) fn on_one_gpu(rank: u32, nccl: Option<Version>) -> Vec<(&'static str, String)> {
    let fixed: &[(&str, &str)] = match nccl {
        Some(version) if version >= SWITCH => {
            &[("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "4"), ("NCCL_NVLS_ENABLE", "0")]
        }
        _ => &[
            ("NCCL_NET", "Socket"),
            ("NCCL_IB_DISABLE", "1"),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_NVLS_ENABLE", "0"),
            ("NCCL_MNNVL_ENABLE", "0"),
            ("NCCL_MAX_CTAS", "2"),
        ],
    };
    let mut variables: Vec<(&'static str, String)> =
        fixed.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    if nccl.is_none_or(|version| version < SWITCH) {
        variables.push((HOST_ID, host_id(rank)));
    }
    variables
}

/// The variable by which NCCL tells hosts apart.
pub(crate) const HOST_ID: &str = "NCCL_HOSTID";

/// A host id that no other rank of the world has.
pub(crate) fn host_id(rank: u32) -> String {
    format!("mgpu-rank-{rank}")
}

/// All NCCL variables that the launcher may set. Variables that the user has set are kept.
pub(crate) const NAMES: [&str; 11] = [
    HOST_ID,
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MNNVL_ENABLE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    FAMILY_VARIABLE,
    INTERFACE_VARIABLE,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_gets_the_variables_that_it_supports() {
        let value = |nccl: Option<Version>, name: &str| {
            on_one_gpu(3, nccl).into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        let (old, new) = (Some(Version::from_code(22999)), Some(Version::from_code(23000)));
        for unknown in [None, old] {
            assert_eq!(value(unknown, "NCCL_HOSTID").as_deref(), Some("mgpu-rank-3"));
            assert_eq!(value(unknown, "NCCL_MULTI_RANK_GPU_ENABLE"), None);
        }
        assert_eq!(value(new, "NCCL_HOSTID"), None);
        assert_eq!(value(new, "NCCL_MULTI_RANK_GPU_ENABLE").as_deref(), Some("1"));
        for (name, _) in [on_one_gpu(0, old), on_one_gpu(0, new), on_one_host()].concat() {
            assert!(NAMES.contains(&name), "{name}");
        }
    }
}
