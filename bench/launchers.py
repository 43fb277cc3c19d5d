"""Starts jobs on the hosts of namespaces.py: with mgpurun, torchrun and the launchers of MPI libraries. Standard library only."""

import concurrent.futures
import os
import subprocess

import namespaces
import provenance

BIN = os.path.abspath(os.environ.get("BIN") or os.path.join(provenance.ROOT, "target/release"))
# What an MPI library is told so that ranks on different hosts speak over TCP, and those of one host over shared memory. The first
# group is for all jobs, the second one for jobs with more ranks than cores, which should not spin.
OVER_TCP = {
    "openmpi": ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self,sm", "OMPI_MCA_btl_tcp_if_include": "eth0"},
                {"OMPI_MCA_mpi_yield_when_idle": "1"}),
    "mpich": ({"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}, {}),
    "mpich-ucx": ({"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}, {}),
    "impi": ({"I_MPI_FABRICS": "shm:ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "I_MPI_PIN": "0"},
             {"I_MPI_WAIT_MODE": "1"}),
}


def start_mgpurun(hosts, ranks, program, flags=(), variables=None):
    """Starts an agent with `ranks` ranks on each host. Returns the agents; rank 0 prints to the first."""
    count = len(hosts.hosts)
    command = [os.path.join(BIN, "mgpurun"), "--nnodes", str(count), "--rdzv-endpoint", "n0:29400", "--timeout", "60",
               "-n", str(ranks), *flags]
    return [hosts.start(host, [*command, "--node-rank", str(host), *program], variables=variables) for host in range(count)]


def start_torchrun(hosts, ranks, program, torchrun=("torchrun",), variables=None):
    """The same with torchrun. A `program` that ends in .py is a script of Python."""
    count = len(hosts.hosts)
    is_script = program[0].endswith(".py")
    command = [*torchrun, "--nnodes", str(count), "--nproc-per-node", str(ranks), "--master-addr", namespaces.address(0),
               "--master-port", "29500"]
    words = ["--", *program] if is_script else ["--no-python", *program]
    return [hosts.start(host, [*command, "--node-rank", str(host), *words], variables=variables) for host in range(count)]


def start_mpi(library, hosts, ranks, program, mpiexec, variables=None):
    """The same with the launcher of an MPI library, which starts its daemons on the other hosts."""
    names = [namespaces.address(host) for host in range(len(hosts.hosts))]
    total, shell = str(len(names) * ranks), hosts.path("shell")
    if library == "openmpi":
        # Of version 4, and the names since version 5.
        agent = {"OMPI_MCA_plm_rsh_agent": shell, "OMPI_MCA_oob_tcp_if_include": "eth0",
                 "PRTE_MCA_plm_ssh_agent": shell, "PRTE_MCA_prte_if_include": "eth0"}
        variables = {**agent, **(variables or {})}
        words = ["--allow-run-as-root", "--bind-to", "none", "-H", ",".join(f"{name}:{ranks}" for name in names), "-n", total]
    else:
        agent = ["-bootstrap", "ssh", "-bootstrap-exec"] if library == "impi" else ["-launcher", "ssh", "-launcher-exec"]
        words = [*agent, shell, "-iface", "eth0", "-hosts", ",".join(names), "-ppn", str(ranks), "-n", total]
    # In the mount namespace outside, from which the shell reaches the other hosts.
    return [hosts.start(0, [mpiexec, *words, *program], ("--net", "--uts"), variables)]


def finish(processes, limit=None):
    """Waits for the end of all. Returns exit codes and outputs; a code is None if a process has not ended within `limit` seconds.

    Such a process ends with its host.
    """
    def wait(process):
        try:
            return process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            return "", None

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        outcomes = list(pool.map(wait, processes))
    return [code for _, code in outcomes], [text for text, _ in outcomes]
