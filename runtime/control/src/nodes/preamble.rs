//! The first line of each side: which protocol, which version, which authentication, which run.
//!
//! ```text
//! mgpurun-nodes 1 0.1.0 secret 5b0c…32 digits 90fe…32 digits
//! ```
//!
//! Name of the protocol, its version, the version of mgpurun, the authentication method, the hash of the run id, and a
//! nonce that is fresh for each connection. The line is plain text and its first three words never change their meaning,
//! so that any two versions can say how they differ. It proves nothing by itself: the Noise handshake protects both
//! lines afterwards, and because of the nonces a recorded handshake is worthless.

use std::fmt;

use super::auth::Method;
use super::handshake::Fault;
use super::noise;

/// Version of everything after the preamble; both sides must have the same.
pub(super) const VERSION: u32 = 1;
/// Longest preamble in bytes, with its line end.
pub(super) const MAX_PREAMBLE: usize = 128;

const MAGIC: &str = "mgpurun-nodes";

/// Stands for the run id where it must not be readable: 16 bytes of its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunTag([u8; 16]);

impl RunTag {
    /// The tag of a run id.
    pub fn of(run_id: &str) -> Self {
        let digest = noise::hash("run", &[run_id.as_bytes()]);
        RunTag(*digest.first_chunk().expect("a digest has 32 bytes"))
    }

    /// Ports for a job whose engine names a job id and no port: 16 candidates from 20000 to 29999, all different, so that
    /// jobs with consecutive ids do not meet. The coordinator takes the first free one, agents try them in turn.
    pub fn candidate_ports(&self) -> Vec<u16> {
        let seed = u32::from_le_bytes(*self.0.first_chunk().expect("a tag has 16 bytes"));
        // 10,000 has no factor in common with the stride, so the candidates differ.
        (0..16).map(|index| 20_000 + ((seed % 10_000 + index * 617) % 10_000) as u16).collect()
    }
}

impl fmt::Display for RunTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The preamble of one side.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Preamble {
    pub(super) method: Method,
    pub(super) run: RunTag,
    pub(super) nonce: [u8; 16],
}

impl Preamble {
    pub(super) fn line(&self) -> String {
        let Preamble { method, run, nonce } = self;
        let nonce = RunTag(*nonce);
        let line = format!("{MAGIC} {VERSION} {} {method} {run} {nonce}\n", env!("CARGO_PKG_VERSION"));
        debug_assert!(line.len() <= MAX_PREAMBLE);
        line
    }

    /// Compares the line of the other side with this one.
    pub(super) fn check(&self, line: &str) -> Result<(), Fault> {
        let mut words = line.trim_end_matches('\n').split(' ');
        let mut word = || words.next().ok_or_else(|| Fault::Protocol("sent an incomplete preamble".into()));
        word()?;
        let (version, program) = (word()?, word()?);
        if version != VERSION.to_string() {
            return Err(Fault::Version(format!(
                "is mgpurun {program} with version {version} of the protocol between hosts, this is mgpurun {} with version \
                 {VERSION}; use the same release on all hosts",
                env!("CARGO_PKG_VERSION")
            )));
        }
        let (method, run, nonce) = (word()?, word()?, word()?);
        if words.next().is_some() {
            return Err(Fault::Protocol("sent a preamble with too many words".into()));
        }
        if run != self.run.to_string() {
            return Err(Fault::OtherRun(format!(
                "belongs to another run: the hash of its run id is {run}, here it is {}; check that --rdzv-id is the same \
                 on all hosts",
                self.run
            )));
        }
        if method != self.method.name() {
            return Err(Fault::Authentication(format!(
                "wants authentication by `{method}`, here it is `{}`; give all hosts the same --auth, and the same secret",
                self.method
            )));
        }
        if nonce == RunTag(self.nonce).to_string() {
            return Err(Fault::NotMgpurun("is not mgpurun: it sends back what it receives".into()));
        }
        Ok(())
    }
}

/// Length of the preamble at the start of `input`, with its line end; `None` if it is incomplete.
pub(super) fn preamble_length(input: &[u8]) -> Result<Option<usize>, Fault> {
    let start = format!("{MAGIC} ");
    let common = input.len().min(start.len());
    if input[..common] != start.as_bytes()[..common] {
        return Err(Fault::NotMgpurun(describe_program(input)));
    }
    match input.iter().take(MAX_PREAMBLE).position(|byte| *byte == b'\n') {
        Some(end) if input[..end].iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') => {
            Ok(Some(end + 1))
        }
        None if input.len() < MAX_PREAMBLE => Ok(None),
        _ => Err(Fault::Protocol("sent a malformed preamble".into())),
    }
}

/// A predicate for a program that begins with `input`.
fn describe_program(input: &[u8]) -> String {
    let kinds: &[(&[u8], &str)] = &[
        (b"HTTP/", "an HTTP server"),
        (b"GET ", "an HTTP client"),
        (b"HEAD ", "an HTTP client"),
        (b"POST ", "an HTTP client"),
        (b"OPTIONS ", "an HTTP client"),
        (b"SSH-", "SSH"),
        (b"\x16\x03", "TLS"),
        (b"\x15\x03", "TLS"),
    ];
    let kind = kinds.iter().find(|(start, _)| input.starts_with(start));
    let kind = kind.map_or(String::new(), |(_, kind)| format!(", it is {kind}"));
    let start = input[..input.len().min(24)].escape_ascii();
    format!("is not mgpurun{kind}: it sent \"{start}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preamble(run: &str, nonce: u8) -> Preamble {
        Preamble { method: Method::Secret, run: RunTag::of(run), nonce: [nonce; 16] }
    }

    #[test]
    fn the_candidate_ports_of_a_run_differ() {
        for run in 0..100 {
            let mut ports = RunTag::of(&format!("{run}.0")).candidate_ports();
            ports.sort_unstable();
            ports.dedup();
            assert_eq!(ports.len(), 16);
            assert!(ports.iter().all(|port| (20_000..30_000).contains(port)), "{ports:?}");
        }
        assert_eq!(RunTag::of("7.0").candidate_ports(), RunTag::of("7.0").candidate_ports());
    }

    #[test]
    fn preambles_fit_and_match() {
        let line = preamble("a", 1).line();
        assert!(line.len() <= MAX_PREAMBLE - 16, "{} bytes leave no room for longer versions", line.len());
        assert_eq!(preamble_length(line.as_bytes()).ok(), Some(Some(line.len())));
        assert_eq!(preamble("a", 2).check(&line), Ok(()));
    }

    #[test]
    fn differences_name_both_sides() {
        let (own, text) = (preamble("a", 2), |fault: Result<(), Fault>| fault.unwrap_err().to_string());
        let other = preamble("b", 1).line();
        assert_eq!(
            text(own.check(&other)),
            format!(
                "belongs to another run: the hash of its run id is {}, here it is {}; check that --rdzv-id is the same on \
                 all hosts",
                RunTag::of("b"),
                RunTag::of("a")
            )
        );
        let newer = "mgpurun-nodes 2 7.1.0 anything\n";
        assert!(matches!(own.check(newer), Err(Fault::Version(text)) if text.starts_with(
            "is mgpurun 7.1.0 with version 2 of the protocol between hosts, this is mgpurun 0."
        )));
        let open = Preamble { method: Method::None, ..preamble("a", 1) }.line();
        assert!(text(own.check(&open)).starts_with("wants authentication by `none`, here it is `secret`;"));
        assert!(matches!(own.check(&own.line()), Err(Fault::NotMgpurun(_))), "an echo");
    }

    #[test]
    fn other_programs_are_recognised() {
        let text = |input: &[u8]| preamble_length(input).unwrap_err().to_string();
        assert_eq!(
            text(b"HTTP/1.1 400 Bad Request\r\n"),
            "is not mgpurun, it is an HTTP server: it sent \"HTTP/1.1 400 Bad Request\""
        );
        assert!(text(b"GET / HTTP/1.0\r\n").contains("an HTTP client"));
        assert!(text(b"SSH-2.0-OpenSSH_9.2\r\n").contains("SSH"));
        assert!(text(b"\x16\x03\x01\x02\x00\x01").contains("TLS"));
        assert_eq!(text(b"\0\xff"), "is not mgpurun: it sent \"\\x00\\xff\"");
        assert!(text(&[b"mgpurun-nodes 1 ", &[b'a'; 200][..]].concat()).contains("malformed preamble"));
        assert!(text(b"mgpurun-nodes \x1b[2J\n").contains("malformed preamble"));
    }
}
