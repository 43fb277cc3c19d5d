//! Which address of another host is the one to reach it by?
//!
//! A host has several: of its networks, and of bridges for containers and virtual machines, which often are the same on
//! every host (`docker0` is 172.17.0.1) and lead nowhere. An address in a subnet of one's own is certain; otherwise the
//! one with the longest prefix in common with an own address is the best guess.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// An address of this host, and the length of its subnet's prefix in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OwnAddress {
    pub(super) address: IpAddr,
    pub(super) prefix: u32,
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
        let prefix = mask.map_or(u32::MAX, |mask| leading_ones(mask));
        (!is_link_local).then_some(OwnAddress { address, prefix })
    });
    own.collect()
}

fn ip(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn leading_ones(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    }
}

/// The address of `theirs` in a subnet of one of `ours`. An address that both hosts have is not the other host's.
pub(super) fn in_own_subnet(theirs: &[IpAddr], ours: &[OwnAddress]) -> Option<IpAddr> {
    let is_own = |address: &IpAddr| ours.iter().any(|own| own.address == *address);
    let is_near =
        |address: &IpAddr| ours.iter().any(|own| common_prefix(own.address, *address) >= own.prefix);
    theirs.iter().copied().find(|address| !is_own(address) && is_near(address))
}

/// The address of `theirs` with the longest prefix in common with one of `ours`, the first of several. An address that
/// both hosts have counts only if there is no other.
pub(super) fn nearest(theirs: &[IpAddr], ours: &[IpAddr]) -> Option<IpAddr> {
    let candidates = theirs.iter().rev().filter(|address| !ours.contains(address));
    let best = candidates.max_by_key(|address| ours.iter().map(|own| common_prefix(**address, *own)).max());
    best.or(theirs.first()).copied()
}

/// Number of equal leading bits of two addresses, 0 if they are of different families.
fn common_prefix(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
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
        // Both are this host.
        assert_eq!(nearest(&["172.17.0.1"]), "172.17.0.1");
        // As good as each other: the first.
        assert_eq!(nearest(&["192.168.0.1", "192.168.0.2"]), "192.168.0.1");
        assert_eq!(super::nearest(&[], &ours), None);
    }

    #[test]
    fn subnets_are_those_of_own_addresses() {
        let own = |address: &str, prefix| OwnAddress { address: address.parse().unwrap(), prefix };
        let ours = [own("172.17.0.1", 16), own("10.0.1.5", 24), own("10.9.9.9", 32)];
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
