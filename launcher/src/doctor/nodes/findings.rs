//! What all nodes have found, as tables and problems. Pure.
//!
//! A *problem* keeps a job from running, or makes it run wrongly; each says what to try. A *note* is worth knowing:
//! `mgpurun` itself needs no names of hosts, for instance, but programs that publish their own do.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::wire::{Measured, Test};

/// Largest difference of clocks in seconds that does not matter: the times of log lines and files still make sense.
const CLOCK_TOLERANCE: f64 = 1.0;

/// What `from` has found out about `to`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    pub(super) from: u32,
    pub(super) to: u32,
    /// The addresses of the name of `to`, or why there are none.
    pub(super) names: Result<Vec<IpAddr>, String>,
    pub(super) test: Test,
}

/// The report on all nodes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    nodes: Vec<Facts>,
    pairs: Vec<Pair>,
    notes: Vec<String>,
    problems: Vec<String>,
}

impl Report {
    pub(super) fn new(nodes: Vec<Facts>, pairs: Vec<Pair>) -> Self {
        let mut report = Report { nodes, pairs, notes: Vec::new(), problems: Vec::new() };
        report.compare_nodes();
        report.judge_pairs();
        report
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.problems.is_empty()
    }

    /// The name of a node; with its number if others have the same.
    fn name(&self, node: u32) -> String {
        let host = &self.nodes[node as usize].host;
        match self.nodes.iter().filter(|other| other.host == *host).count() {
            1 => host.clone(),
            _ => format!("{host} (node {node})"),
        }
    }

    /// Compares what nodes should have in common with node 0.
    fn compare_nodes(&mut self) {
        type Value = fn(&Facts) -> Option<String>;
        let mtu: Value = |node| Some(node.interface()?.mtu?.to_string());
        let kinds: Value = |node| Some(format!("{:?}", node.gpus));
        // Without RDMA devices on all nodes nobody uses UCX unless told to.
        let is_rdma = self.nodes.iter().all(|node| !node.rdma.is_empty());
        let ucx: Value = if is_rdma { |node| node.ucx.clone() } else { |_| None };
        let must: [(&str, Value, &str); 4] = [
            ("mgpurun", |node| Some(node.mgpurun.clone()), "install the same version on both"),
            ("the NVIDIA driver", |node| node.driver.clone(), "install the same version on both"),
            (
                "NCCL",
                |node| node.nccl.clone(),
                "install the same version on both, or name the file in MGPU_NCCL_LIBRARY",
            ),
            (
                "UCX",
                ucx,
                "install the same version on both (libucx0, or libucx-cu12 from PyPI), or ranks use tcp",
            ),
        ];
        for node in 1..self.nodes.len() {
            let (first, other) = (&self.nodes[0], &self.nodes[node]);
            let (a, b) = (self.name(0), self.name(node as u32));
            let mut problems = Vec::new();
            for (what, value, remedy) in &must {
                let (ours, theirs) = (value(first), value(other));
                if ours != theirs {
                    let text = |value: Option<String>| value.unwrap_or_else(|| "none".into());
                    let (ours, theirs) = (text(ours), text(theirs));
                    problems
                        .push(format!("versions of {what} differ: {ours} on {a}, {theirs} on {b}; {remedy}"));
                }
            }
            let mut notes = Vec::new();
            if first.gpus.len() != other.gpus.len() {
                let (ours, theirs) = (first.gpus.len(), other.gpus.len());
                notes.push(format!("{a} has {ours} GPUs and {b} has {theirs}: give -n, some versions of NCCL hang with unequal nodes"));
            } else if kinds(first) != kinds(other) {
                notes
                    .push(format!("{a} and {b} have different models of GPUs: the slower ones set the pace"));
            }
            if let (Some(ours), Some(theirs)) = (mtu(first), mtu(other))
                && ours != theirs
            {
                notes.push(format!("the MTU of {a} is {ours} and that of {b} is {theirs}"));
            }
            self.problems.extend(problems);
            self.notes.extend(notes);
        }
    }

    fn judge_pairs(&mut self) {
        for pair in &self.pairs {
            let (from, to) = (self.name(pair.from), self.name(pair.to));
            let other = &self.nodes[pair.to as usize];
            let address =
                other.address.map_or("an unknown address".to_owned(), |address| address.to_string());
            match &pair.names {
                Err(why) => {
                    let host = &other.host;
                    self.notes.push(format!("{from} does not know the name {host}: {why}"));
                }
                Ok(addresses) => self.problems.extend(
                    wrong_name(other, addresses)
                        .map(|wrong| format!("on {from} the name {} is {wrong}, and {to} has {address}: correct /etc/hosts or the name server of {from}", other.host)),
                ),
            }
            match &pair.test {
                Test::Measured(Measured { clock, .. }) if clock.abs() > CLOCK_TOLERANCE && pair.from < pair.to => {
                    let order = if *clock > 0.0 { "ahead of" } else { "behind" };
                    let by = clock.abs();
                    self.problems.push(format!(
                        "the clock of {to} is {by:.1} s {order} that of {from}: start chrony or ntpd on both"
                    ));
                }
                Test::Measured(_) => {}
                Test::Unreachable(why) => self.problems.push(format!(
                    "{from} cannot connect to {to} at {address}, port {}: {why}; open the firewall of {to} for all ports from {from}, or choose another network by --local-addr",
                    other.port
                )),
                Test::Stalled(why) => self.problems.push(format!(
                    "{from} reaches {to} at {address}, but a stream of data does not arrive: {why}; the MTU may be too large for a switch or tunnel between them"
                )),
            }
        }
    }

    fn node_table(&self) -> Vec<Vec<String>> {
        let text = |value: Option<String>| value.unwrap_or_else(|| "none".into());
        let mut rows = vec![
            [
                "node",
                "host",
                "address",
                "interface",
                "MTU",
                "RDMA",
                "UCX",
                "GPUs",
                "driver",
                "NCCL",
                "kernel",
                "mgpurun",
            ]
            .map(String::from)
            .to_vec(),
        ];
        rows.extend(self.nodes.iter().enumerate().map(|(number, node)| {
            let interface = node.interface();
            vec![
                number.to_string(),
                node.host.clone(),
                node.address.map_or("unknown".into(), |address| address.to_string()),
                interface.map_or("unknown".into(), |interface| interface.name.clone()),
                interface.and_then(|interface| interface.mtu).map_or("unknown".into(), |mtu| mtu.to_string()),
                if node.rdma.is_empty() { "none".into() } else { node.rdma.join(",") },
                text(node.ucx.clone()),
                node.gpus.len().to_string(),
                text(node.driver.clone()),
                text(node.nccl.clone()),
                node.kernel.clone(),
                node.mgpurun.clone(),
            ]
        }));
        rows
    }

    fn pair_table(&self) -> Vec<Vec<String>> {
        let mut rows = vec![["from", "to", "round trip", "bandwidth", "clock"].map(String::from).to_vec()];
        rows.extend(self.pairs.iter().map(|pair| {
            let [round_trip, bandwidth, clock] = match &pair.test {
                Test::Measured(figures) => [
                    format!("{:.3} ms", figures.round_trip * 1e3),
                    format!("{:.2} GB/s", figures.bandwidth / 1e9),
                    format!("{:+.3} s", to_milliseconds(figures.clock)),
                ],
                Test::Unreachable(_) => ["no connection", "-", "-"].map(String::from),
                Test::Stalled(_) => ["-", "stalled", "-"].map(String::from),
            };
            vec![self.name(pair.from), self.name(pair.to), round_trip, bandwidth, clock]
        }));
        rows
    }
}

/// Rounded, and without the sign of a zero.
fn to_milliseconds(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3 + 0.0
}

/// The addresses of a name, if none is one of the node's.
fn wrong_name(node: &Facts, addresses: &[IpAddr]) -> Option<String> {
    let is_right = addresses.iter().any(|address| node.has(address.to_canonical()));
    let list = || addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    (!is_right).then(list)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_table(f, &self.node_table())?;
        writeln!(f)?;
        write_table(f, &self.pair_table())?;
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "problem: {problem}"))?;
        match self.problems.len() {
            0 => writeln!(f, "no problem found between {} nodes", self.nodes.len()),
            1 => writeln!(f, "1 problem found"),
            count => writeln!(f, "{count} problems found"),
        }
    }
}

/// Writes rows in columns. Names come from other hosts: control characters are left out.
fn write_table(f: &mut fmt::Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let clean = |cell: &String| cell.chars().filter(|c| !c.is_control()).collect::<String>();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(clean).collect()).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line += &format!("{cell:width$}  ");
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::facts::Interface;
    use super::*;

    fn node(host: &str, address: &str) -> Facts {
        let address: IpAddr = address.parse().unwrap();
        Facts {
            host: host.into(),
            address: Some(address),
            port: 4000,
            interfaces: vec![Interface { name: "eth0".into(), address, mtu: Some(1500) }],
            mgpurun: "1.0".into(),
            kernel: "6.8".into(),
            driver: Some("580.1".into()),
            nccl: Some("2.31.2".into()),
            rdma: vec!["mlx5_0".into()],
            ucx: Some("1.13.1".into()),
            gpus: vec!["H100".into()],
        }
    }

    fn nodes() -> Vec<Facts> {
        vec![node("a", "10.0.0.1"), node("b", "10.0.0.2")]
    }

    fn pair(from: u32, to: u32) -> Pair {
        let names = Ok(vec![format!("10.0.0.{}", to + 1).parse().unwrap()]);
        Pair {
            from,
            to,
            names,
            test: Test::Measured(Measured { round_trip: 1e-4, bandwidth: 2.5e9, clock: 0.0 }),
        }
    }

    #[test]
    fn healthy_nodes_are_shown_in_two_tables() {
        let report = Report::new(nodes(), vec![pair(0, 1), pair(1, 0)]);
        assert!(report.is_healthy());
        insta::assert_snapshot!(report.to_string(), @r"
        node  host  address   interface  MTU   RDMA    UCX     GPUs  driver  NCCL    kernel  mgpurun
        0     a     10.0.0.1  eth0       1500  mlx5_0  1.13.1  1     580.1   2.31.2  6.8     1.0
        1     b     10.0.0.2  eth0       1500  mlx5_0  1.13.1  1     580.1   2.31.2  6.8     1.0

        from  to  round trip  bandwidth  clock
        a     b   0.100 ms    2.50 GB/s  +0.000 s
        b     a   0.100 ms    2.50 GB/s  +0.000 s

        no problem found between 2 nodes
        ");
    }

    #[test]
    fn each_problem_names_both_hosts_and_what_to_try() {
        let with = |change: fn(&mut Facts)| {
            let mut nodes = nodes();
            change(&mut nodes[1]);
            Report::new(nodes, vec![pair(0, 1), pair(1, 0)])
        };
        let of_test = |test: Test| Report::new(nodes(), vec![Pair { test, ..pair(0, 1) }]);
        let of_names = |names| Report::new(nodes(), vec![Pair { names, ..pair(0, 1) }]);
        let clock = |clock| Test::Measured(Measured { round_trip: 1e-4, bandwidth: 1e9, clock });
        for (report, text) in [
            (
                with(|node| node.mgpurun = "2.0".into()),
                "versions of mgpurun differ: 1.0 on a, 2.0 on b; install",
            ),
            (with(|node| node.driver = None), "versions of the NVIDIA driver differ: 580.1 on a, none on b"),
            (with(|node| node.ucx = None), "versions of UCX differ: 1.13.1 on a, none on b; install"),
            (with(|node| node.nccl = Some("2.30".into())), "versions of NCCL differ: 2.31.2 on a, 2.30 on b"),
            (
                of_test(Test::Unreachable("no answer within 3 s".into())),
                "a cannot connect to b at 10.0.0.2, port 4000: no answer within 3 s; open the firewall of b",
            ),
            (of_test(Test::Stalled("no answer within 3 s".into())), "the MTU may be too large"),
            (of_test(clock(2.5)), "the clock of b is 2.5 s ahead of that of a: start chrony"),
            (of_test(clock(-2.5)), "the clock of b is 2.5 s behind that of a"),
            (
                of_names(Ok(vec!["127.0.1.1".parse().unwrap()])),
                "on a the name b is 127.0.1.1, and b has 10.0.0.2: correct /etc/hosts",
            ),
        ] {
            assert_eq!(report.problems.len(), 1, "{report}");
            assert!(report.to_string().contains(&format!("problem: {}", report.problems[0])));
            assert!(report.problems[0].contains(text), "{report}");
        }
    }

    #[test]
    fn what_does_no_harm_is_a_note() {
        let mut unequal = nodes();
        unequal[1].gpus.push("H100".into());
        unequal[1].interfaces[0].mtu = Some(9000);
        let report = Report::new(unequal, Vec::new());
        assert!(report.is_healthy() && report.notes.len() == 2, "{report}");
        let report = Report::new(nodes(), vec![Pair { names: Err("no name server".into()), ..pair(0, 1) }]);
        assert_eq!(report.notes, ["a does not know the name b: no name server"]);
        // One of several addresses is right; clocks are as close as that.
        let names = Ok(vec!["127.0.1.1".parse().unwrap(), "10.0.0.2".parse().unwrap()]);
        let test = Test::Measured(Measured { round_trip: 1e-4, bandwidth: 1e9, clock: 0.9 });
        let report = Report::new(nodes(), vec![Pair { names, test, ..pair(0, 1) }]);
        assert!(report.is_healthy() && report.notes.is_empty(), "{report}");
    }
}
