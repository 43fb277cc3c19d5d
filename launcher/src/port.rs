//! Reserves a TCP port for programs with their own rendezvous, PyTorch above all.
//!
//! A port that was free may be taken by another process a moment later, by another launch for instance. So the launcher
//! holds it during the run with a socket that is bound to it and does not listen. While this socket exists, the kernel
//! does not assign the port to a process that asks for any port. A process can still bind it by number: several sockets
//! may be bound to a port if all of them set `SO_REUSEADDR` and none listens yet, and connections go to the first one
//! that listens. PyTorch's store sets the option, as do gRPC (and so JAX), Go, asyncio and Rust's standard library. A
//! server that does not set it gets "address already in use". This is the drawback: such a server, which could not be
//! restarted at once on a fixed port either, has to use another port here.

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt};

/// PyTorch's default port.
const DEFAULT_PORT: u16 = 29500;

/// A port of the loopback interface, reserved as long as this value lives.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    number: u16,
    /// Bound and not listening; `None` if there is no loopback interface, and so no connection either.
    _socket: Option<TcpListener>,
}

impl ReservedPort {
    /// Reserves any free port.
    pub(crate) fn reserve() -> Self {
        let bound = bind_to(0).and_then(|socket| Ok((socket.local_addr()?.port(), socket)));
        match bound {
            Ok((number, socket)) => ReservedPort { number, _socket: Some(socket) },
            Err(_) => ReservedPort { number: DEFAULT_PORT, _socket: None },
        }
    }

    /// Reserves this port.
    ///
    /// # Errors
    /// If another process listens there, or this one may not.
    pub(crate) fn of_number(number: u16) -> io::Result<Self> {
        match bind_to(number) {
            Ok(socket) => Ok(ReservedPort { number, _socket: Some(socket) }),
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                Ok(ReservedPort { number, _socket: None })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

/// A socket bound to a port; to one of the kernel's choice if that is 0.
fn bind_to(port: u16) -> io::Result<TcpListener> {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port))?;
    // A `TcpListener` only to query its address; it never listens.
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::TcpStream;

    use nix::errno::Errno;

    use super::*;

    #[test]
    fn reserved_ports_are_unique() {
        let reserved: Vec<ReservedPort> = (0..200).map(|_| ReservedPort::reserve()).collect();
        let mut numbers: HashSet<u16> = reserved.iter().map(ReservedPort::number).collect();
        assert_eq!(numbers.len(), reserved.len());
        // Processes that ask for any port get none of them either.
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
            // A second listener fails, as always.
            assert!(TcpListener::bind((address, reserved.number())).is_err());
        }
    }

    #[test]
    fn a_port_can_be_named_unless_somebody_listens_there() {
        let number = ReservedPort::reserve().number();
        let reserved = ReservedPort::of_number(number).unwrap();
        assert_eq!(reserved.number(), number);
        let _listener = TcpListener::bind(("127.0.0.1", number)).unwrap();
        drop(reserved);
        assert_eq!(ReservedPort::of_number(number).unwrap_err().kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn a_server_without_so_reuseaddr_is_refused() {
        let reserved = ReservedPort::reserve();
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let address = SockaddrIn::new(127, 0, 0, 1, reserved.number());
        assert_eq!(bind(socket.as_raw_fd(), &address), Err(Errno::EADDRINUSE));
        drop(reserved);
        assert_eq!(bind(socket.as_raw_fd(), &address), Ok(()));
    }
}
