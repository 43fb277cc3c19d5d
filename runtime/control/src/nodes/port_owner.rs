//! Which process listens at a port of this host, as far as `/proc` says so: it shows the open files of other users'
//! processes to root only.

use std::fs;
use std::path::Path;

/// State of a socket that listens, in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// A process that listens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PortOwner {
    pub(super) pid: u32,
    /// The first 15 bytes of its program's name.
    pub(super) name: String,
}

/// Who listens at `port`, or how to find out: a clause for messages.
pub fn who_listens(port: u16) -> String {
    describe(find(port).as_ref())
}

pub(super) fn describe(owner: Option<&PortOwner>) -> String {
    match owner {
        Some(PortOwner { pid, name }) => format!("process {pid} ({name}) listens there, as `ss -ltnp` shows"),
        None => "`ss -ltnp` shows who listens there".to_owned(),
    }
}

/// The process that listens at `port`; `None` if none is found.
pub(super) fn find(port: u16) -> Option<PortOwner> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| fs::read_to_string(file).unwrap_or_default());
    let sockets: Vec<String> = tables.iter().flat_map(|table| listening_sockets(table, port)).collect();
    let is_owner = |process: &Path| {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| sockets.iter().any(|socket| target == Path::new(socket)))
    };
    if sockets.is_empty() {
        return None;
    }
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let process = entry.path();
        let name = || Some(fs::read_to_string(process.join("comm")).ok()?.trim_end().to_owned());
        is_owner(&process).then(name).flatten().map(|name| PortOwner { pid, name })
    })
}

/// The sockets of a table that listen at `port`, as the links in `/proc/PID/fd` name them.
fn listening_sockets(table: &str, port: u16) -> impl Iterator<Item = String> {
    let port = format!(":{port:04X}");
    table.lines().skip(1).filter_map(move |line| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let listens = columns.get(1)?.ends_with(&port) && *columns.get(3)? == LISTENS;
        listens.then(|| columns.get(9).map(|inode| format!("socket:[{inode}]"))).flatten()
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn only_sockets_that_listen_at_the_port_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n \
             0: 00000000:72D8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0\n \
             1: 0100007F:72D8 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0\n \
             2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0\n \
             3: 00000000:72D8 cut\n";
        let of = |port| listening_sockets(table, port).collect::<Vec<_>>();
        assert_eq!(of(29400), ["socket:[4711]"]);
        assert_eq!(of(22), ["socket:[4713]"]);
        assert_eq!(of(40000), [""; 0]);
        assert_eq!(listening_sockets("", 1).count(), 0);
    }

    #[test]
    fn this_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(find(port).map(|owner| owner.pid), Some(std::process::id()));
    }
}
