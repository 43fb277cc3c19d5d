//! Which network interface will NCCL take? Pure, except for [`own_interfaces`] and [`SocketVariables::detect`].
//!
//! All ranks of a communicator meet over sockets, also where their gradients go over InfiniBand. NCCL takes the first
//! interface whose name begins with `ib`; or else the first one that does not begin with `docker`, `lo` or `virbr`; or else
//! the first one that begins with `docker`, `lo` or `virbr`, in this order. The order is that of getifaddrs(3): all
//! addresses of IPv4 come before those of IPv6. `NCCL_SOCKET_IFNAME` replaces these rules by a list of prefixes, or of
//! names behind a `=`; a `^` before them means all others. `NCCL_SOCKET_FAMILY` chooses IPv4 or IPv6. Both may also be in
//! NCCL's files; the environment takes precedence.
//!
//! NCCL passes over interfaces that are not running since 2.28.3. A launcher does not know which release its ranks load, so
//! there may be two candidates.
//!
//! With `NCCL_COMM_ID` NCCL takes an interface of the network of that address instead, and nothing is predicted.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

/// NCCL's variable for the names of interfaces.
pub const INTERFACE_VARIABLE: &str = "NCCL_SOCKET_IFNAME";
/// NCCL's variable for IPv4 or IPv6.
pub const FAMILY_VARIABLE: &str = "NCCL_SOCKET_FAMILY";

/// NCCL's variable for the address of rank 0.
const ADDRESS_VARIABLE: &str = "NCCL_COMM_ID";

/// Lists that NCCL tries in turn if the user has given none.
const AUTOMATIC: [&str; 5] = ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"];

/// An address of an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name, such as `eth0`.
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
    /// It is up, and there is a link.
    pub is_running: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    fn name(self) -> &'static str {
        match self {
            Family::V4 => "AF_INET",
            Family::V6 => "AF_INET6",
        }
    }
}

/// NCCL's settings of the interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketVariables {
    interfaces: Option<String>,
    family: Option<Family>,
    /// The user has named the address at which the ranks meet.
    names_address: bool,
}

/// The addresses of this host in the order in which NCCL sees them.
pub fn own_interfaces() -> Vec<Interface> {
    let interface = |name: String, flags: InterfaceFlags, address: &SockaddrStorage| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        let address = v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))?;
        Some(Interface { name, address, is_running: flags.contains(InterfaceFlags::IFF_RUNNING) })
    };
    let listed = getifaddrs().into_iter().flatten();
    listed
        .filter_map(|listed| interface(listed.interface_name, listed.flags, listed.address.as_ref()?))
        .collect()
}

impl SocketVariables {
    /// Those of this process's environment, and of NCCL's files.
    pub fn detect() -> Self {
        let variable = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
        Self::read(variable, |path| std::fs::read_to_string(path).ok())
    }

    fn read(variable: impl Fn(&str) -> Option<String>, file: impl Fn(&str) -> Option<String>) -> Self {
        let of_user = match variable("NCCL_CONF_FILE").filter(|path| !path.is_empty()) {
            Some(path) => file(&path),
            None => variable("HOME").and_then(|home| file(&format!("{home}/.nccl.conf"))),
        };
        let files = [of_user, file("/etc/nccl.conf")];
        let in_file = |text: &str, name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines.find_map(|(key, value)| (key == name).then(|| value.to_owned()))
        };
        let value = |name: &str| {
            variable(name).or_else(|| files.iter().flatten().find_map(|text| in_file(text, name)))
        };
        let families = [Family::V4, Family::V6];
        SocketVariables {
            // As NCCL: a single character is no list.
            interfaces: value(INTERFACE_VARIABLE).filter(|list| list.len() > 1),
            family: value(FAMILY_VARIABLE)
                .and_then(|name| families.into_iter().find(|family| family.name() == name)),
            names_address: value(ADDRESS_VARIABLE).is_some(),
        }
    }

    /// The user or the site has chosen the interfaces.
    pub fn names_interfaces(&self) -> bool {
        self.interfaces.is_some()
    }

    /// What NCCL takes on a host with these `interfaces`, as a sentence.
    pub fn describe(&self, interfaces: &[Interface]) -> String {
        if self.names_address {
            return format!("NCCL takes an interface of the network of {ADDRESS_VARIABLE}");
        }
        let name = |interface: &Interface| format!("{} ({})", interface.name, interface.address);
        match self.candidates(interfaces, None)[..] {
            [] => "NCCL finds no interface for other hosts".to_owned(),
            [one] => format!("NCCL takes the interface {}", name(one)),
            [recent, older, ..] => {
                format!("NCCL takes the interface {}, in older releases {}", name(recent), name(older))
            }
        }
    }

    /// Those of `interfaces` of which NCCL takes one. `passes_over_idle` says whether the release passes over interfaces that
    /// are not running. If that is not known: the choice of recent releases, and that of older ones if it is another.
    pub fn candidates<'a>(
        &self,
        interfaces: &'a [Interface],
        passes_over_idle: Option<bool>,
    ) -> Vec<&'a Interface> {
        if self.names_address {
            return Vec::new();
        }
        let running = || self.choose(interfaces.iter().filter(|interface| interface.is_running));
        let recent = (passes_over_idle != Some(false)).then(running).flatten();
        let older = (passes_over_idle != Some(true)).then(|| self.choose(interfaces.iter())).flatten();
        let mut candidates: Vec<&Interface> = recent.into_iter().chain(older).collect();
        candidates.dedup();
        candidates
    }

    /// The one of `interfaces` that NCCL takes.
    fn choose<'a>(
        &self,
        mut interfaces: impl Iterator<Item = &'a Interface> + Clone,
    ) -> Option<&'a Interface> {
        match &self.interfaces {
            Some(list) => interfaces.find(|interface| self.accepts(interface, list)),
            None => AUTOMATIC
                .iter()
                .find_map(|list| interfaces.clone().find(|interface| self.accepts(interface, list))),
        }
    }

    /// Whether an interface is of the right family, and on a list in the syntax of `NCCL_SOCKET_IFNAME`.
    fn accepts(&self, interface: &Interface, list: &str) -> bool {
        let (is_excluding, list) = strip(list, '^');
        let (is_exact, list) = strip(list, '=');
        // A name may have a port behind it, which means nothing here.
        let names = list.split(',').filter_map(|entry| entry.split(':').next());
        let mut names = names.filter(|name| !name.is_empty()).peekable();
        let is_listed = names.peek().is_none()
            || names.any(|name| match is_exact {
                true => interface.name == name,
                false => interface.name.starts_with(name),
            });
        let family = Family::of(interface.address);
        is_listed != is_excluding
            && self.family.is_none_or(|wanted| wanted == family)
            && !(family == Family::V6 && interface.address.is_loopback())
    }

    /// The variables with which NCCL takes the interface that has `address`; `None` if there is none.
    pub fn variables_for(
        &self,
        address: IpAddr,
        interfaces: &[Interface],
    ) -> Option<Vec<(&'static str, String)>> {
        let name = &interfaces.iter().find(|interface| interface.address == address)?.name;
        let list = match name.split_once(':') {
            None => format!("={name}"),
            // An alias; NCCL takes what is behind the colon for a port.
            Some((name, _)) => name.to_owned(),
        };
        let chosen = SocketVariables { interfaces: Some(list.clone()), ..self.clone() };
        let mut variables = vec![(INTERFACE_VARIABLE, list)];
        let is_chosen = chosen.choose(interfaces.iter()).is_some_and(|chosen| chosen.address == address);
        if !is_chosen && self.family.is_none() {
            // The interface has addresses of both families, and NCCL would take the other one.
            variables.push((FAMILY_VARIABLE, Family::of(address).name().to_owned()));
        }
        Some(variables)
    }
}

/// Removes a leading `sign`; tells whether there was one.
fn strip(list: &str, sign: char) -> (bool, &str) {
    list.strip_prefix(sign).map_or((false, list), |rest| (true, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(list: &[(&str, &str)]) -> Vec<Interface> {
        let interface = |(name, address): &(&str, &str)| Interface {
            name: (*name).into(),
            address: address.parse().unwrap(),
            is_running: true,
        };
        list.iter().map(interface).collect()
    }

    fn host() -> Vec<Interface> {
        interfaces(&[
            ("lo", "127.0.0.1"),
            ("docker0", "172.17.0.1"),
            ("eth0", "10.0.0.1"),
            ("eth1", "10.1.0.1"),
            ("ib0", "10.2.0.1"),
            ("lo", "::1"),
            ("eth0", "fd00::1"),
        ])
    }

    fn settings(pairs: &[(&str, &str)]) -> SocketVariables {
        let value = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into());
        SocketVariables::read(value, |_| None)
    }

    fn chosen(variables: &SocketVariables, interfaces: &[Interface]) -> String {
        let described = |chosen: &&Interface| format!("{} {}", chosen.name, chosen.address);
        let chosen: Vec<String> = variables.candidates(interfaces, None).iter().map(described).collect();
        if chosen.is_empty() { "none".into() } else { chosen.join(", ") }
    }

    #[test]
    fn without_settings_the_order_of_kinds_decides() {
        let mut host = host();
        for expected in
            ["ib0 10.2.0.1", "eth0 10.0.0.1", "eth1 10.1.0.1", "docker0 172.17.0.1", "lo 127.0.0.1", "none"]
        {
            let chosen = chosen(&settings(&[]), &host);
            assert_eq!(chosen, expected);
            let name = chosen.split(' ').next().unwrap();
            host.retain(|interface| interface.name != name);
        }
        assert_eq!(
            chosen(&settings(&[]), &interfaces(&[("virbr0", "192.168.122.1")])),
            "virbr0 192.168.122.1"
        );
        // A prefix of a name, and not the name, is excluded.
        let host = interfaces(&[("local0", "10.0.0.1"), ("docker0", "172.17.0.1")]);
        assert_eq!(chosen(&settings(&[]), &host), "docker0 172.17.0.1");
    }

    #[test]
    fn older_releases_may_take_an_interface_without_a_link() {
        let mut host = host();
        host[4].is_running = false;
        assert_eq!(chosen(&settings(&[]), &host), "eth0 10.0.0.1, ib0 10.2.0.1");
        assert_eq!(chosen(&settings(&[(INTERFACE_VARIABLE, "=ib0")]), &host), "ib0 10.2.0.1");
        assert_eq!(chosen(&settings(&[(INTERFACE_VARIABLE, "eth")]), &host), "eth0 10.0.0.1");
        for (passes_over_idle, expected) in [(true, "eth0"), (false, "ib0")] {
            let known = settings(&[]);
            let known = known.candidates(&host, Some(passes_over_idle));
            assert_eq!(known.iter().map(|known| &known.name[..]).collect::<Vec<_>>(), [expected]);
        }
        assert_eq!(
            settings(&[]).describe(&host),
            "NCCL takes the interface eth0 (10.0.0.1), in older releases ib0 (10.2.0.1)"
        );
    }

    #[test]
    fn lists_have_prefixes_or_names() {
        for (list, expected) in [
            ("eth", "eth0 10.0.0.1"),
            ("eth1", "eth1 10.1.0.1"),
            ("et", "eth0 10.0.0.1"),
            ("=et", "none"),
            ("=eth1,eth0", "eth0 10.0.0.1"),
            ("^lo,docker,eth0", "eth1 10.1.0.1"),
            ("^=lo,docker", "docker0 172.17.0.1"),
            ("eth1:4000", "eth1 10.1.0.1"),
            ("wlan", "none"),
            // Too short to be a list.
            ("=", "ib0 10.2.0.1"),
            ("", "ib0 10.2.0.1"),
            // An empty list: all of them, or none.
            (",,", "lo 127.0.0.1"),
            ("^=", "none"),
        ] {
            assert_eq!(chosen(&settings(&[(INTERFACE_VARIABLE, list)]), &host()), expected, "{list}");
        }
    }

    #[test]
    fn a_family_may_be_chosen() {
        let of = |family| chosen(&settings(&[(FAMILY_VARIABLE, family)]), &host());
        assert_eq!(of("AF_INET6"), "eth0 fd00::1");
        assert_eq!(of("AF_INET"), "ib0 10.2.0.1");
        assert_eq!(of("ipv6"), "ib0 10.2.0.1");
    }

    #[test]
    fn nothing_is_predicted_for_a_given_address() {
        let named = settings(&[("NCCL_COMM_ID", "10.1.0.1:7000")]);
        assert_eq!(chosen(&named, &host()), "none");
        assert_eq!(named.describe(&host()), "NCCL takes an interface of the network of NCCL_COMM_ID");
    }

    #[test]
    fn files_count_after_the_environment() {
        let of_user = "NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth1\n";
        let read = |variables: &[(&str, &str)], path: &str| {
            let value =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into());
            let file = |name: &str| match name {
                "/etc/nccl.conf" => Some("NCCL_SOCKET_IFNAME=docker\nNCCL_SOCKET_FAMILY=AF_INET".into()),
                _ => (name == path).then(|| of_user.into()),
            };
            chosen(&SocketVariables::read(value, file), &host())
        };
        assert_eq!(read(&[], ""), "docker0 172.17.0.1");
        assert_eq!(read(&[("HOME", "/h")], "/h/.nccl.conf"), "eth1 10.1.0.1");
        assert_eq!(read(&[("HOME", "/h"), ("NCCL_CONF_FILE", "/x")], "/h/.nccl.conf"), "docker0 172.17.0.1");
        assert_eq!(read(&[("NCCL_CONF_FILE", "/x")], "/x"), "eth1 10.1.0.1");
        assert_eq!(read(&[("NCCL_CONF_FILE", "/x"), (INTERFACE_VARIABLE, "=eth0")], "/x"), "eth0 10.0.0.1");
    }

    #[test]
    fn variables_lead_to_an_address() {
        let host = [host(), interfaces(&[("eth1:vip", "10.1.0.9")])].concat();
        let variables = |address: &str, settings: &SocketVariables| {
            let variables = settings.variables_for(address.parse().unwrap(), &host)?;
            Some(
                variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "),
            )
        };
        let none = settings(&[]);
        assert_eq!(variables("10.1.0.1", &none).unwrap(), "NCCL_SOCKET_IFNAME==eth1");
        assert_eq!(
            variables("fd00::1", &none).unwrap(),
            "NCCL_SOCKET_IFNAME==eth0 NCCL_SOCKET_FAMILY=AF_INET6"
        );
        assert_eq!(
            variables("fd00::1", &settings(&[(FAMILY_VARIABLE, "AF_INET")])).unwrap(),
            "NCCL_SOCKET_IFNAME==eth0"
        );
        assert!(variables("10.1.0.9", &none).unwrap().starts_with("NCCL_SOCKET_IFNAME=eth1"));
        assert_eq!(variables("10.9.9.9", &none), None);
    }

    #[test]
    fn this_host_has_a_loopback_interface() {
        assert!(own_interfaces().iter().any(|interface| interface.address.is_loopback()));
    }
}
