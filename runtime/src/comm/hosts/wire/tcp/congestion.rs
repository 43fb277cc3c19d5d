//! The congestion control of the connections between ranks.
//!
//! It is the system's, unless that is BBR: then it is cubic, the default of Linux, or reno. BBR paces: each segment waits for a timer of its
//! own, which costs more than the segment where two hosts are near each other, and it shares a link badly with streams that begin
//! and end all the time. Systems have BBR for what they serve to the internet; connections between ranks stay in a cluster.
//! `MGPU_NET_CONGESTION` names another one.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, setsockopt, sockopt::TcpCongestion};

/// Name of a congestion control, as in `/proc/sys/net/ipv4/tcp_allowed_congestion_control`.
const MGPU_NET_CONGESTION: &str = "MGPU_NET_CONGESTION";

/// Chooses the congestion control of a socket that listens or is not connected yet: later it would keep the pace of the first one.
/// What a listening socket accepts inherits it.
///
/// # Errors
/// If the environment names one that the kernel does not have or allow.
pub(in super::super::super) fn choose(socket: &impl AsFd) -> io::Result<()> {
    choose_as_told(socket, std::env::var_os(MGPU_NET_CONGESTION))
}

fn choose_as_told(socket: &impl AsFd, wanted: Option<OsString>) -> io::Result<()> {
    if let Some(name) = wanted {
        return setsockopt(socket, TcpCongestion, &name).map_err(|errno| {
            let name = name.to_string_lossy();
            io::Error::other(format!(
                "{MGPU_NET_CONGESTION} is `{name}`, which the kernel refuses: {}",
                errno.desc()
            ))
        });
    }
    if getsockopt(socket, TcpCongestion)?.as_encoded_bytes().starts_with(b"bbr") {
        // The kernel may not have the first one, or not allow it; without either the socket keeps what it has.
        let _ = ["cubic", "reno"].iter().find(|name| setsockopt(socket, TcpCongestion, &name.into()).is_ok());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn name(socket: &impl AsFd) -> String {
        let name = getsockopt(socket, TcpCongestion).unwrap();
        name.to_string_lossy().trim_end_matches('\0').to_owned()
    }

    #[test]
    fn accepted_connections_do_not_pace() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let before = name(&listener);
        choose(&listener).unwrap();
        let _near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        assert_eq!(name(&far), name(&listener));
        assert!(name(&far) == before || before.starts_with("bbr") && !name(&far).starts_with("bbr"));
    }

    #[test]
    fn a_name_is_taken_or_refused_as_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        choose_as_told(&listener, Some("reno".into())).unwrap();
        assert_eq!(name(&listener), "reno");
        let error = choose_as_told(&listener, Some("renault".into())).unwrap_err().to_string();
        assert!(error.starts_with("MGPU_NET_CONGESTION is `renault`, which the kernel refuses: "), "{error}");
    }
}
