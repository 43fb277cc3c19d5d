//! Which address of another host is the one to reach it by?
//!
//! A host has several: of its networks, and of bridges for containers and virtual machines, which often are the same on
//! every host (`docker0` is 172.17.0.1) and lead nowhere. An address in a subnet of one's own is certain; otherwise the
//! one that shares the longest prefix with an own address is the best guess.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// An address of this host, and the number of bits in which addresses of its subnet differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OwnAddress {
    pub(super) address: IpAddr,
    pub(super) host_bits: u32,
}

/// The addresses by which other hosts may reach this one: not those of the loopback interface, nor link-local ones.
pub(super) fn own_addresses() -> Vec<OwnAddress> {
    let interfaces = getifaddrs().into_iter().flatten();
    let is_usable = |flags: InterfaceFlags| {
        flags.contains(InterfaceFlags::IFF_UP) && !flags.contains(InterfaceFlags::IFF_LOOPBACK)
    };
    let own = interfaces.filter(|interface| is_usable(interface.flags)).filter_map(|interface| {
        let address = ip(&interface.address?)?;
        let is_link_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let mask = interface.netmask.and_then(|mask| ip(&mask));
        let host_bits = mask.map_or(0, trailing_zeros);
        (!is_link_local).then_some(OwnAddress { address, host_bits })
    });
    own.collect()
}

fn ip(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn trailing_zeros(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().trailing_zeros(),
        IpAddr::V6(mask) => mask.to_bits().trailing_zeros(),
    }
}

/// The address of `theirs` in a subnet of one of `ours`. An address that both hosts have is not the other host's.
pub(super) fn in_own_subnet(theirs: &[IpAddr], ours: &[OwnAddress]) -> Option<IpAddr> {
    let is_own = |address: &IpAddr| ours.iter().any(|own| own.address == *address);
    let is_near =
        |address: &IpAddr| ours.iter().any(|own| differing_bits(own.address, *address) <= own.host_bits);
    theirs.iter().copied().find(|address| !is_own(address) && is_near(address))
}

/// The address of `theirs` that differs from one of `ours` in the fewest trailing bits, the first of several. An address
/// that both hosts have counts only if there is no other.
pub(super) fn nearest(theirs: &[IpAddr], ours: &[IpAddr]) -> Option<IpAddr> {
    let candidates = theirs.iter().filter(|address| !ours.contains(address));
    let distance = |address: IpAddr| ours.iter().map(move |own| differing_bits(address, *own)).min();
    let best = candidates.min_by_key(|address| distance(**address));
    best.or(theirs.first()).copied()
}

/// Number of trailing bits that two addresses do not share, more than all if they are of different families.
fn differing_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => 32 - (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => 128 - (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn the_nearest_address_is_not_one_that_both_hosts_have() {
        let ours = addresses(&["172.17.0.1", "10.0.1.5", "fd00::5"]);
        let nearest = |theirs: &[&str]| nearest(&addresses(theirs), &ours).unwrap().to_string();
        assert_eq!(nearest(&["172.17.0.1", "192.168.0.9", "10.0.1.9"]), "10.0.1.9");
        assert_eq!(nearest(&["172.17.0.1", "fd00::9"]), "fd00::9");
        assert_eq!(nearest(&["fd00::4:9", "10.0.1.4"]), "10.0.1.4");
        // Both are this host.
        assert_eq!(nearest(&["172.17.0.1"]), "172.17.0.1");
        // As good as each other: the first.
        assert_eq!(nearest(&["192.168.0.1", "192.168.0.2"]), "192.168.0.1");
        assert_eq!(super::nearest(&[], &ours), None);
    }

    #[test]
    fn subnets_are_those_of_own_addresses() {
        let own = |address: &str, host_bits| OwnAddress { address: address.parse().unwrap(), host_bits };
        let ours = [own("172.17.0.1", 16), own("10.0.1.5", 8), own("10.9.9.9", 0)];
        let near =
            |theirs: &[&str]| in_own_subnet(&addresses(theirs), &ours).map(|address| address.to_string());
        assert_eq!(near(&["172.17.0.1", "10.0.1.9"]).as_deref(), Some("10.0.1.9"));
        assert_eq!(near(&["172.17.0.1", "172.18.0.1", "10.0.2.9", "fd00::1"]), None);
        assert_eq!(near(&["10.9.9.9"]), None);
    }

    #[test]
    fn own_addresses_are_not_of_the_loopback_interface() {
        assert!(own_addresses().iter().all(|own| !own.address.is_loopback()));
    }
}
