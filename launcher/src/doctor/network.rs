//! What connects ranks of different hosts.

use super::report::{Item, Mark, Section};
use super::system::Host;

/// The section.
pub(super) fn section(host: &Host) -> Section {
    let ucx = match &host.ucx {
        Ok(version) => {
            Item { version: Some(version.clone()), ..Item::new(Mark::Ok, "ucx", format!("UCX {version}")) }
        }
        Err(why) => Item::new(Mark::Note, "ucx", format!("optional, for RDMA devices; {why}")),
    };
    let rdma = match ucx_sys::rdma_devices(&host.root).as_slice() {
        [] => Item::new(Mark::Note, "RDMA devices", "none (InfiniBand, RoCE, EFA): --net auto takes tcp"),
        devices => Item::new(Mark::Ok, "RDMA devices", devices.join(", ")),
    };
    let items = vec![Item::new(Mark::Ok, "tcp", "built in"), ucx, rdma];
    Section { title: "Network between hosts", items }
}
