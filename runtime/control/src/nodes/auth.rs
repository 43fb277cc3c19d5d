//! How agents prove to each other that they belong to one user's job.
//!
//! A secret is hashed as soon as it is read, and only the hash stays in memory. It is never printed: the types have no
//! `Display`, and their `Debug` text is the name of the method. Somebody who records a handshake can try guesses of the
//! secret against it, so a secret should be random (`openssl rand -hex 32`) rather than a phrase.

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::munge::Munge;
use super::noise;
use crate::{Error, Result};

/// Length of a secret in bytes: least and most.
const SECRET_LENGTH: (usize, usize) = (16, 4096);

/// The path that means standard input.
const STANDARD_INPUT: &str = "-";

/// How the two ends of a connection authenticate each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By a shared secret.
    Secret,
    /// By munge.
    Munge,
    /// Not at all.
    None,
}

impl Method {
    /// Its name in the preamble and in `--auth`.
    pub fn name(self) -> &'static str {
        match self {
            Method::Secret => "secret",
            Method::Munge => "munge",
            Method::None => "none",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an agent authenticates with. All agents of a job have the same.
#[derive(Clone)]
pub enum Credentials {
    /// A shared secret: both sides prove that they know it, and everything after is encrypted.
    Secret(Secret),
    /// munge: both sides prove that they are processes of the same user of the cluster, and everything after is encrypted.
    Munge(Munge),
    /// None: whoever reaches the port can join the job, read what it sends, and change it.
    None,
}

impl Credentials {
    /// Their method.
    pub fn method(&self) -> Method {
        match self {
            Credentials::Secret(_) => Method::Secret,
            Credentials::Munge(_) => Method::Munge,
            Credentials::None => Method::None,
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.method().name())
    }
}

/// A secret that all agents of a job share. Its memory is overwritten when the last copy is dropped.
#[derive(Clone)]
pub struct Secret {
    key: Arc<Zeroizing<[u8; 32]>>,
}

impl Secret {
    /// A secret of 16 to 4096 bytes. A line end after it does not belong to it.
    ///
    /// # Errors
    /// If it is too short or too long. `source` is where it is from, for the text.
    pub fn new(text: &[u8], source: &str) -> Result<Self> {
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let (least, most) = SECRET_LENGTH;
        let problem = match text.len() {
            len if len < least => format!("it has {len} bytes, at least {least} are needed"),
            len if len > most => format!("it has more than {most} bytes, the maximum"),
            _ => return Ok(Secret { key: Arc::new(Zeroizing::new(noise::hash("secret", &[text]))) }),
        };
        let remedy = "`openssl rand -hex 32` makes a good one";
        Err(Error::system(format!("use the secret of {source}"), format!("{problem}; {remedy}")))
    }

    /// Reads the secret from a file that other users cannot access. The path `-` is the first line of standard input;
    /// what follows it is left there.
    ///
    /// # Errors
    /// If the file cannot be read or other users have access to it, if `-` is a terminal, or as [`new`](Self::new).
    pub fn read(path: &Path) -> Result<Self> {
        if path == Path::new(STANDARD_INPUT) {
            return Self::read_line();
        }
        let failed = |why: String| Error::system(format!("read the secret from {}", path.display()), why);
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let mode = file.metadata().map_err(|error| failed(error.to_string()))?.permissions().mode() & 0o7777;
        if mode & 0o007 != 0 {
            return Err(failed(format!(
                "all users have access to it (mode {mode:04o}); `chmod o= {}`, or set `defaultMode: 0400` if it is a volume \
                 of Kubernetes",
                path.display()
            )));
        }
        // The capacity is never exceeded: growing the vector would leave a copy of the secret behind.
        let longest = SECRET_LENGTH.1 + "\r\n".len() + 1;
        let mut text = Zeroizing::new(Vec::with_capacity(2 * longest));
        file.take(longest as u64).read_to_end(&mut text).map_err(|error| failed(error.to_string()))?;
        Self::new(&text, &path.display().to_string())
    }

    /// Reads the secret from the first line of standard input.
    fn read_line() -> Result<Self> {
        let failed = |why: String| Error::system("read the secret from standard input", why);
        if io::stdin().is_terminal() {
            let why = "it is a terminal, which would show the secret; give it a file or a pipe";
            return Err(failed(why.into()));
        }
        let input = io::stdin().as_fd().try_clone_to_owned().map_err(|error| failed(error.to_string()))?;
        let mut input = File::from(input);
        let mut text = Zeroizing::new(Vec::with_capacity(SECRET_LENGTH.1 + 1));
        // Byte by byte: whoever reads on gets everything behind the line.
        let mut byte = Zeroizing::new([0]);
        while text.len() <= SECRET_LENGTH.1 {
            match input.read(&mut byte[..]) {
                Ok(0) => break,
                Ok(_) if byte[0] == b'\n' => break,
                Ok(_) => text.push(byte[0]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Self::new(&text, "standard input")
    }

    pub(super) fn key(&self) -> &[u8; 32] {
        &self.key
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Method::Secret.name())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    #[test]
    fn a_line_end_does_not_belong_to_a_secret() {
        let key = |text: &[u8]| Secret::new(text, "MGPU_SECRET").map(|secret| *secret.key());
        let plain = key(b"0123456789abcdef").unwrap();
        assert_eq!(key(b"0123456789abcdef\n").unwrap(), plain);
        assert_eq!(key(b"0123456789abcdef\r\n").unwrap(), plain);
        assert_ne!(key(b"0123456789abcdef\n\n").unwrap(), plain);
        assert_ne!(key(b"0123456789abcdeg").unwrap(), plain);
    }

    #[test]
    fn short_and_long_secrets_are_refused_without_being_shown() {
        let error = Secret::new(b"0123456789abcde\n", "MGPU_SECRET").unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot use the secret of MGPU_SECRET: it has 15 bytes, at least 16 are needed; `openssl rand -hex 32` makes a \
             good one"
        );
        assert!(Secret::new(&[7; 4096], "x").is_ok());
        let error = Secret::new(&[7; 4097], "x").unwrap_err().to_string();
        assert!(error.contains("more than 4096 bytes"), "{error}");
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        for (mode, refused) in [(0o644, true), (0o604, true), (0o602, true), (0o640, false), (0o400, false)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = Secret::read(&path).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), refused, "mode {mode:o}: {error:?}");
            assert!(error.is_none_or(|error| error.contains(&format!("mode {mode:04o}"))));
        }
        fs::write(&path, vec![7; 4099]).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("more than 4096"));
        let error = Secret::read(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the secret from "), "{error}");
    }

    #[test]
    fn debug_texts_show_nothing_of_a_secret() {
        let secret = Secret::new(b"0123456789abcdef", "x").unwrap();
        assert_eq!(format!("{secret:?} {:?}", Credentials::Secret(secret.clone())), "secret secret");
    }
}
