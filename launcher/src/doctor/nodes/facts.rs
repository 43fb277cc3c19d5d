//! What a node knows about itself.

use std::fs;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::SockaddrStorage;
use nix::unistd::gethostname;
use serde::{Deserialize, Serialize};

use super::super::{Host, libraries, nvidia};
use crate::placement::list_gpus;

/// A node, as the others are told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    /// Name of its host.
    pub(super) host: String,
    /// Its address as the other nodes reach it.
    pub(super) address: Option<IpAddr>,
    /// The port of its [`Server`](super::wire::Server).
    pub(super) port: u16,
    /// All its addresses, with their interfaces.
    pub(super) interfaces: Vec<Interface>,
    /// Version of mgpurun.
    pub(super) mgpurun: String,
    pub(super) kernel: String,
    /// Version of the NVIDIA driver, if there is one.
    pub(super) driver: Option<String>,
    /// Version of NCCL, or its file if that does not tell the version.
    pub(super) nccl: Option<String>,
    /// Its RDMA devices.
    #[serde(default)]
    pub(super) rdma: Vec<String>,
    /// Version of UCX, if it can be used.
    #[serde(default)]
    pub(super) ucx: Option<String>,
    /// The models of its GPUs.
    pub(super) gpus: Vec<String>,
}

/// An address of a network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) address: IpAddr,
    /// Largest packet in bytes, if that is known.
    pub(super) mtu: Option<u32>,
}

/// Most interfaces that are told: a host of containers may have hundreds, and a value of the store has 12 KiB.
const MAX_INTERFACES: usize = 64;
const MAX_GPUS: usize = 64;

impl Facts {
    /// This node's facts; nothing is opened or changed.
    pub(super) fn gather(address: Option<IpAddr>, port: u16) -> Facts {
        let host = Host::detect();
        let name =
            gethostname().map_or_else(|_| "unknown".into(), |name| name.to_string_lossy().into_owned());
        let mut interfaces = interfaces();
        // The one that is used counts.
        interfaces.sort_by_key(|interface| Some(interface.address) != address);
        interfaces.truncate(MAX_INTERFACES);
        let gpus = list_gpus(&host.root).into_iter().take(MAX_GPUS);
        Facts {
            host: name,
            address,
            port,
            interfaces,
            mgpurun: env!("CARGO_PKG_VERSION").into(),
            kernel: host
                .read("/proc/sys/kernel/osrelease")
                .map_or("unknown".into(), |text| text.trim().to_owned()),
            driver: nvidia::version(&host),
            nccl: libraries::nccl(&host),
            rdma: ucx_sys::rdma_devices(&host.root),
            ucx: host.ucx.ok(),
            gpus: gpus.map(|gpu| gpu.model.unwrap_or_else(|| "unknown model".into())).collect(),
        }
    }

    /// The interface that its address belongs to.
    pub(super) fn interface(&self) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| Some(interface.address) == self.address)
    }

    /// True if this is an address by which other hosts may mean this node.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        Some(address) == self.address || self.interfaces.iter().any(|interface| interface.address == address)
    }
}

/// The addresses of this host, without those of the loopback interface.
fn interfaces() -> Vec<Interface> {
    let all = getifaddrs().into_iter().flatten();
    let named = all.filter_map(|interface| Some((ip(&interface.address?)?, interface.interface_name)));
    let others = named.filter(|(address, _)| !address.is_loopback());
    others.map(|(address, name)| Interface { address, mtu: mtu(&name), name }).collect()
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn mtu(interface: &str) -> Option<u32> {
    let folder = format!("/sys/class/net/{interface}");
    let number = |file: &str| fs::read_to_string(format!("{folder}/{file}")).ok()?.trim().parse::<u32>().ok();
    // In a container /sys may be that of the host, with other interfaces of the same names.
    let is_own = number("ifindex") == if_nametoindex(interface).ok();
    number("mtu").filter(|_| is_own)
}
