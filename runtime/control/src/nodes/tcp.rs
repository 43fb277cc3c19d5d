//! Sockets between hosts: how they connect, how they listen, and how the kernel notices that the other host is gone.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, listen, setsockopt, socket,
    sockopt,
};

/// After this time without a sign of life of the other host the kernel gives the connection up, in milliseconds.
///
/// A message is sent each second at least, and its first byte that is not acknowledged starts the time: so a host that
/// is gone is noticed within 5.5 s. A probe is sent each second, up to a second before an outage begins: so an outage of
/// 3 s is survived, by the probe at its end. `unacknowledged` covers the case in which the kernel starts the time again.
pub(super) const USER_TIMEOUT: u32 = 4500;

/// Starts a connection, from the address `from` if it is given. The socket becomes writable when it is connected or has
/// failed.
pub(super) fn start_connecting(to: SocketAddr, from: Option<IpAddr>) -> io::Result<TcpStream> {
    let fd = open(to.ip())?;
    if let Some(from) = from {
        bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    }
    let stream = TcpStream::from(fd);
    configure(&stream)?;
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => Ok(stream),
        Err(errno) => Err(errno.into()),
    }
}

/// Listens at `port`: of `address`, or of all addresses of both families, of IPv4 only where there is no IPv6.
pub(super) fn listen_at(address: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    match address {
        Some(address) => listen_on(SocketAddr::new(address, port)),
        None => match listen_on(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)) {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL)
                ) =>
            {
                listen_on(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port))
            }
            result => result,
        },
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let fd = open(address.ip())?;
    // A port is free again as soon as the job before has ended.
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &(address.ip() != Ipv6Addr::UNSPECIFIED))?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&fd, Backlog::MAXALLOWABLE)?;
    Ok(TcpListener::from(fd))
}

fn open(address: IpAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    Ok(socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?)
}

/// Makes a connection non-blocking and asks the kernel to watch it: probes after a second of silence, and an error after
/// 4.5 s without any answer, also while sent bytes are not acknowledged. A stopped process keeps answering, because its
/// kernel does, as long as its buffers have room for what it is sent.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &1)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &1)?;
    setsockopt(stream, sockopt::TcpKeepCount, &4)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &USER_TIMEOUT)?;
    Ok(())
}

/// An address as people write it: IPv4 addresses that arrived on an IPv6 socket as IPv4 addresses.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// The text of a system error, without its number: "connection refused".
pub(super) fn describe(error: &io::Error) -> String {
    let text = error.raw_os_error().map_or(error.to_string(), |code| Errno::from_raw(code).desc().to_owned());
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_lowercase().chain(chars).collect())
}
