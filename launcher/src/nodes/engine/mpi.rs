//! Open MPI, and the hydra of MPICH and Intel MPI: each agent is a process of an MPI job with one process on each host.

use std::net::IpAddr;

use super::super::addresses::nearest;
use super::super::settings::{Ports, Surroundings};
use super::{Engine, Given, Reading, Tasks, Told};

/// Open MPI does not say where rank 0 is, but where mpirun is. The host of mpirun has daemon 0, and hosts get numbers in
/// the order of mpirun's list. So both are the same host if daemons have the numbers of their ranks; otherwise mpirun
/// was started on a host that is not the first of its list.
pub(super) fn open_mpi(variables: &Surroundings<'_>) -> Reading {
    let Some(size) = variables.number("OMPI_COMM_WORLD_SIZE")? else { return Ok(None) };
    let rank = variables.number("OMPI_COMM_WORLD_RANK")?.unwrap_or(Given::new(0, "OMPI_COMM_WORLD_RANK"));
    let local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let local_size = local_size.unwrap_or(Given::new(1, "OMPI_COMM_WORLD_LOCAL_SIZE"));
    let mut told = Told::by(Engine::OpenMpi);
    if daemon(variables) == Some(rank.value) {
        told.endpoint = host_of_mpirun(variables).map(|host| host.map(|host| (host, Ports::OfJob)));
    }
    Tasks { rank, size, local_size }.describe(&mut told, "add -N 1 to mpirun, and -n to mgpurun");
    told.run_id = variables.given("PMIX_NAMESPACE");
    Ok(Some(told))
}

/// The number of this host's daemon: 1 in `847708160.1;tcp://...` and in `prterun-a-24219@0.1;tcp4://...`.
fn daemon(variables: &Surroundings<'_>) -> Option<u32> {
    let names = ["OMPI_MCA_orte_local_daemon_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4"];
    let uri = names.into_iter().find_map(|name| variables.text(name))?;
    uri.split(';').next()?.rsplit_once('.')?.1.parse().ok()
}

fn host_of_mpirun(variables: &Surroundings<'_>) -> Option<Given<String>> {
    let of_mpirun = "OMPI_MCA_orte_hnp_uri";
    if let Some(uri) = variables.text(of_mpirun) {
        // Open MPI 4: the addresses of mpirun, and those of the daemon of this host.
        let here = variables.text("OMPI_MCA_orte_local_daemon_uri")?;
        let address = nearest(&addresses(&uri), &addresses(&here))?;
        return Some(Given::new(address.to_string(), of_mpirun));
    }
    // Open MPI 5: the name of the job is prterun-HOST-PID@JOB.
    let name = variables.text("PMIX_NAMESPACE")?;
    let (host, _) = name.strip_prefix("prterun-")?.rsplit_once('@')?.0.rsplit_once('-')?;
    Some(Given::new(host.to_owned(), "PMIX_NAMESPACE"))
}

/// The addresses in a URI of Open MPI: `1.0;tcp://192.0.2.2,10.0.0.2:55813;tcp6://[fd00::2]:34629`.
fn addresses(uri: &str) -> Vec<IpAddr> {
    let hosts = uri.split(';').filter_map(|part| {
        let (_, rest) = part.split_once("://")?;
        if let Some(rest) = rest.strip_prefix('[') {
            return rest.split_once(']').map(|(hosts, _)| hosts);
        }
        rest.split(':').next()
    });
    hosts.flat_map(|hosts| hosts.split(',')).filter_map(|host| host.parse().ok()).collect()
}

/// Hydra starts the processes of MPICH and Intel MPI. Where rank 0 is, they have to ask it by PMI.
pub(super) fn mpich(variables: &Surroundings<'_>) -> Reading {
    let Some(local_size) = variables.number("MPI_LOCALNRANKS")? else { return Ok(None) };
    let rank = variables.first_number(&["PMI_RANK", "PMI_ID"])?;
    let (Some(rank), Some(size)) = (rank, variables.number("PMI_SIZE")?) else { return Ok(None) };
    let mut told = Told::by(Engine::Mpich);
    Tasks { rank, size, local_size }.describe(&mut told, "add -ppn 1 to mpiexec, and -n to mgpurun");
    Ok(Some(told))
}
