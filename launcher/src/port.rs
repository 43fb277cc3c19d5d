//! The TCP port for programs that make a rendezvous of their own: PyTorch's, above all.
//!
//! A port that is found free may be taken a moment later by somebody else, another launch for instance. So the launcher
//! holds it for the length of the run, by a socket that is bound to it and does not listen. While it is there, the
//! kernel hands the port out to nobody who asks for any. It can still be had by asking for its number: of sockets that
//! all have `SO_REUSEADDR`, several may be bound to a port as long as none listens yet, and the first to listen is the
//! one that connections go to. PyTorch's store sets the option, as do gRPC (and so JAX), Go, asyncio and Rust's standard
//! library. A server that does not set it is refused ("address already in use"). That is the price: such a server could
//! not be started twice in a row on a fixed port either, and has to ask for a port of its own here.

use std::net::TcpListener;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt};

/// What PyTorch takes where nobody says otherwise.
const DEFAULT_PORT: u16 = 29500;

/// A port of the loopback interface, held as long as this exists.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    number: u16,
    /// Bound and not listening; `None` where there is no loopback interface, and so nobody to connect either.
    _socket: Option<TcpListener>,
}

impl ReservedPort {
    /// Reserves any free port.
    pub(crate) fn reserve() -> Self {
        let bound = bind_any().and_then(|socket| Ok((socket.local_addr()?.port(), socket)));
        match bound {
            Ok((number, socket)) => ReservedPort { number, _socket: Some(socket) },
            Err(_) => ReservedPort { number: DEFAULT_PORT, _socket: None },
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

/// A socket bound to a port of the kernel's choice.
fn bind_any() -> std::io::Result<TcpListener> {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0))?;
    // For its address; it never listens.
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::TcpStream;

    use nix::errno::Errno;

    use super::*;

    #[test]
    fn no_two_reservations_are_the_same() {
        let reserved: Vec<ReservedPort> = (0..200).map(|_| ReservedPort::reserve()).collect();
        let mut numbers: HashSet<u16> = reserved.iter().map(ReservedPort::number).collect();
        assert_eq!(numbers.len(), reserved.len());
        // Nor does anybody else who asks for any port get one of them.
        let others: Vec<TcpListener> = (0..200).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(others.iter().all(|other| numbers.insert(other.local_addr().unwrap().port())));
    }

    #[test]
    fn a_rank_can_listen_on_it() {
        for address in ["127.0.0.1", "0.0.0.0", "::"] {
            let reserved = ReservedPort::reserve();
            let Ok(listener) = TcpListener::bind((address, reserved.number())) else {
                assert_eq!(address, "::", "only IPv6 may be missing");
                continue;
            };
            let _client = TcpStream::connect(("127.0.0.1", reserved.number())).unwrap();
            listener.accept().unwrap();
            // And no second one, as ever.
            assert!(TcpListener::bind((address, reserved.number())).is_err());
        }
    }

    #[test]
    fn a_server_that_does_not_share_is_refused() {
        let reserved = ReservedPort::reserve();
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let address = SockaddrIn::new(127, 0, 0, 1, reserved.number());
        assert_eq!(bind(socket.as_raw_fd(), &address), Err(Errno::EADDRINUSE));
        drop(reserved);
        assert_eq!(bind(socket.as_raw_fd(), &address), Ok(()));
    }
}
