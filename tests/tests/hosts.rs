//! Jobs on several hosts: whatever fails, every surviving host says the same culprit, exits with the same code, and
//! nothing is left anywhere. The hosts are namespaces of this machine; where these are forbidden, nothing is tested.
//!
//! `failures` is the table of what fails, in jobs of several sizes; `restarts` are jobs that continue afterwards.
//! `peers` are others who connect to the coordinator, `names` how nodes find it, `contradictions` nodes that differ,
//! `network` ranks that are connected by UCX, `training` ranks that compute over several hosts, and `reports` what the user sees of them.
//!
//! Most time here is spent waiting for time-outs, so such cases run at the same time.

#[path = "hosts/contradictions.rs"]
mod contradictions;
#[path = "hosts/failures.rs"]
mod failures;
#[path = "hosts/job.rs"]
pub(crate) mod job;
#[path = "hosts/names.rs"]
mod names;
#[path = "hosts/network.rs"]
mod network;
#[path = "hosts/peers.rs"]
mod peers;
#[path = "hosts/reports.rs"]
mod reports;
#[path = "hosts/restarts.rs"]
mod restarts;
#[path = "hosts/training.rs"]
mod training;
