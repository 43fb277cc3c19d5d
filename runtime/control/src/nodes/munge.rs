//! Authentication by munge, the daemon with which the hosts of a Slurm cluster vouch for their users.
//!
//! The daemons of all hosts have one key. On request they make a *credential*: an encrypted, signed text that says which
//! user asked for it, with a payload. Only a daemon with the same key can read it, and it can be restricted to one user.
//!
//! The side that dials makes a credential for its own user. The payload is a fresh key, and the hash of both preambles
//! of this connection, so the credential is worthless on any other one. The side that listens reads it, checks that it
//! is of the same user, and both continue with the Noise handshake under that key. That proves the other direction:
//! nobody but a process of this user could read the key. So everything after it is encrypted as with a secret. What
//! munge does not protect against is a process of the same user on another host of the cluster, and root.
//!
//! `libmunge.so.2` is opened at run time. It asks the daemon over a local socket and may block, so every request has a
//! thread ([`Background`]). Their number is bounded: somebody who connects again and again could pile them up otherwise.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::libc;
use zeroize::Zeroizing;

use super::background::Background;

const LIBRARY_NAME: &str = "libmunge.so.2";
/// Maximum number of requests at once.
const MAX_REQUESTS: usize = 64;

/// `munge_ctx_t`.
type Context = *mut c_void;

// Options of a context, and a cipher, as in `munge.h`.
const CIPHER_TYPE: c_int = 0;
const SOCKET: c_int = 8;
const UID_RESTRICTION: c_int = 9;
const CIPHER_AES128: c_int = 4;

type CreateContext = unsafe extern "C" fn() -> Context;
type DestroyContext = unsafe extern "C" fn(Context);
type SetOption = unsafe extern "C" fn(Context, c_int, ...) -> c_int;
type ContextError = unsafe extern "C" fn(Context) -> *const c_char;
type Encode = unsafe extern "C" fn(*mut *mut c_char, Context, *const c_void, c_int) -> c_int;
type Decode = unsafe extern "C" fn(
    *const c_char,
    Context,
    *mut *mut c_void,
    *mut c_int,
    *mut libc::uid_t,
    *mut libc::gid_t,
) -> c_int;

/// A realm of munge, or one of a test.
pub(super) trait Realm: Send + Sync {
    /// The user of this process.
    fn user(&self) -> u32;
    /// A credential of this user, for this user.
    fn encode(&self, payload: &[u8]) -> Result<Vec<u8>, String>;
    /// Payload and user of a credential.
    fn decode(&self, credential: &[u8]) -> Result<(Zeroizing<Vec<u8>>, u32), String>;
}

/// Access to the munge daemon of this host.
#[derive(Clone)]
pub struct Munge {
    realm: Arc<dyn Realm>,
    /// One more reference for each request that runs.
    requests: Arc<()>,
}

impl Munge {
    /// Opens libmunge. `socket`: that of the daemon, if it is not libmunge's default. Whether the daemon runs is not known
    /// before the first connection.
    ///
    /// # Errors
    /// A text that says why the library cannot be used.
    pub fn open(socket: Option<&Path>) -> Result<Self, String> {
        let socket = socket.map(|path| CString::new(path.as_os_str().as_bytes())).transpose();
        let socket = socket.map_err(|_| "the path of munge's socket contains a zero byte")?;
        Ok(Self::new(LibMunge::open(socket)?))
    }

    pub(super) fn new(realm: impl Realm + 'static) -> Self {
        Munge { realm: Arc::new(realm), requests: Arc::new(()) }
    }

    pub(super) fn user(&self) -> u32 {
        self.realm.user()
    }

    /// Starts a request on a thread.
    pub(super) fn start(
        &self,
        request: MungeRequest,
    ) -> Result<Background<Result<MungeAnswer, String>>, String> {
        if Arc::strong_count(&self.requests) > MAX_REQUESTS {
            return Err("the munge daemon does not answer".into());
        }
        let (realm, requests) = (self.realm.clone(), self.requests.clone());
        let call = move || {
            let _running = requests;
            request.perform(&*realm)
        };
        Background::start("munge", call).map_err(|error| format!("cannot ask the munge daemon: {error}"))
    }
}

/// A request to the daemon.
pub(super) enum MungeRequest {
    /// Make a credential with this payload.
    Encode(Zeroizing<Vec<u8>>),
    /// Read a credential.
    Decode(Vec<u8>),
}

impl MungeRequest {
    fn perform(self, realm: &dyn Realm) -> Result<MungeAnswer, String> {
        match self {
            MungeRequest::Encode(payload) => realm.encode(&payload).map(MungeAnswer::Credential),
            MungeRequest::Decode(credential) => {
                realm.decode(&credential).map(|(payload, user)| MungeAnswer::Payload(payload, user))
            }
        }
    }
}

/// Its answer.
pub(super) enum MungeAnswer {
    Credential(Vec<u8>),
    /// The payload, and the user who made the credential.
    Payload(Zeroizing<Vec<u8>>, u32),
}

/// The functions of libmunge, of one daemon.
struct LibMunge {
    create_context: CreateContext,
    destroy_context: DestroyContext,
    set_option: SetOption,
    context_error: ContextError,
    encode: Encode,
    decode: Decode,
    socket: Option<CString>,
    /// Keeps the functions.
    _library: Library,
}

impl LibMunge {
    fn open(socket: Option<CString>) -> Result<Self, String> {
        let failed = |error: libloading::Error| {
            let reason = std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
            format!("cannot open munge's library: {reason}")
        };
        // SAFETY: the system's libmunge; loading it runs no code that expects anything of this process.
        let library = unsafe { Library::open(Some(OsStr::new(LIBRARY_NAME)), RTLD_NOW | RTLD_LOCAL) }
            .map_err(failed)?;
        // SAFETY: the types are those of `munge.h`, which have not changed within version 2 of the library; the pointers
        // are kept together with the library.
        unsafe {
            Ok(LibMunge {
                create_context: *library.get(b"munge_ctx_create").map_err(failed)?,
                destroy_context: *library.get(b"munge_ctx_destroy").map_err(failed)?,
                set_option: *library.get(b"munge_ctx_set").map_err(failed)?,
                context_error: *library.get(b"munge_ctx_strerror").map_err(failed)?,
                encode: *library.get(b"munge_encode").map_err(failed)?,
                decode: *library.get(b"munge_decode").map_err(failed)?,
                socket,
                _library: library,
            })
        }
    }

    /// Calls `request` with a context of its own.
    fn with_context<T>(&self, request: impl FnOnce(Context) -> Result<T, c_int>) -> Result<T, String> {
        // SAFETY: it takes no arguments.
        let context = unsafe { (self.create_context)() };
        if context.is_null() {
            return Err("munge has no memory".into());
        }
        let result = self
            .choose_socket(context)
            .and_then(|()| request(context))
            .map_err(|code| self.text(context, code));
        // SAFETY: it was created above, and nothing uses it any more.
        unsafe { (self.destroy_context)(context) };
        result
    }

    fn choose_socket(&self, context: Context) -> Result<(), c_int> {
        match &self.socket {
            // SAFETY: the option takes a string, which the library copies.
            Some(path) => check(unsafe { (self.set_option)(context, SOCKET, path.as_ptr()) }),
            None => Ok(()),
        }
    }

    fn text(&self, context: Context, code: c_int) -> String {
        // SAFETY: the context is valid; the text, if there is one, lives as long as the context and is copied here.
        let text = unsafe {
            let text = (self.context_error)(context);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        text.unwrap_or_else(|| format!("munge failed with code {code}"))
    }
}

impl Realm for LibMunge {
    fn user(&self) -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn encode(&self, payload: &[u8]) -> Result<Vec<u8>, String> {
        self.with_context(|context| {
            let mut credential = std::ptr::null_mut();
            // SAFETY: both options take an int. The payload has the length given, and the library writes one pointer to a
            // string of its own, or null.
            unsafe {
                // Never none: the payload is a key.
                check((self.set_option)(context, CIPHER_TYPE, CIPHER_AES128))?;
                check((self.set_option)(context, UID_RESTRICTION, self.user()))?;
                check((self.encode)(
                    &mut credential,
                    context,
                    payload.as_ptr().cast(),
                    payload.len() as c_int,
                ))?;
                let bytes = CStr::from_ptr(credential).to_bytes().to_vec();
                libc::free(credential.cast());
                Ok(bytes)
            }
        })
    }

    fn decode(&self, credential: &[u8]) -> Result<(Zeroizing<Vec<u8>>, u32), String> {
        let credential = CString::new(credential).map_err(|_| "the credential contains a zero byte")?;
        self.with_context(|context| {
            let (mut payload, mut length) = (std::ptr::null_mut(), 0);
            let (mut user, mut group) = (libc::uid_t::MAX, libc::gid_t::MAX);
            // SAFETY: the credential ends with a zero byte, and the library writes to four variables of the types of
            // `munge.h`. It returns a payload of its own, or null, also with some errors; it is wiped and freed in every
            // case.
            unsafe {
                let code = (self.decode)(
                    credential.as_ptr(),
                    context,
                    &mut payload,
                    &mut length,
                    &mut user,
                    &mut group,
                );
                let mut bytes = Zeroizing::new(Vec::new());
                if !payload.is_null() {
                    let kept = std::slice::from_raw_parts_mut(payload.cast::<u8>(), length.max(0) as usize);
                    bytes.extend_from_slice(kept);
                    zeroize::Zeroize::zeroize(kept);
                    libc::free(payload);
                }
                check(code).map(|()| (bytes, user))
            }
        })
    }
}

fn check(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A realm without a daemon.
#[cfg(test)]
pub(super) mod fake {
    use super::*;

    /// The daemon as this user sees it. Its credentials are not secret, and it does not notice a replay.
    pub(in super::super) struct FakeRealm {
        pub(in super::super) user: u32,
        /// The daemon cannot be reached.
        pub(in super::super) is_down: bool,
    }

    impl Realm for FakeRealm {
        fn user(&self) -> u32 {
            self.user
        }

        fn encode(&self, payload: &[u8]) -> Result<Vec<u8>, String> {
            self.check()?;
            Ok([&b"FAKE:"[..], &self.user.to_le_bytes(), payload].concat())
        }

        fn decode(&self, credential: &[u8]) -> Result<(Zeroizing<Vec<u8>>, u32), String> {
            self.check()?;
            let rest = credential.strip_prefix(b"FAKE:").ok_or("no credential")?;
            let (user, payload) = rest.split_first_chunk().ok_or("no credential")?;
            Ok((payload.to_vec().into(), u32::from_le_bytes(*user)))
        }
    }

    impl FakeRealm {
        fn check(&self) -> Result<(), String> {
            if self.is_down { Err("the daemon does not answer".into()) } else { Ok(()) }
        }
    }

    impl Munge {
        pub(in super::super) fn fake(user: u32) -> Self {
            Self::new(FakeRealm { user, is_down: false })
        }

        /// Answers a request at once.
        pub(in super::super) fn perform(&self, request: MungeRequest) -> Result<MungeAnswer, String> {
            request.perform(&*self.realm)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a daemon, or at least with libmunge, if this machine has one.
    #[test]
    fn a_credential_of_the_real_daemon_can_be_read_once() {
        let socket = std::env::var_os("MGPU_TEST_MUNGE_SOCKET");
        let library = LibMunge::open(socket.map(|path| CString::new(path.as_bytes()).unwrap()));
        let Ok(munge) = library else { return println!("skipped: no libmunge") };
        let credential = match munge.encode(b"payload") {
            Ok(credential) => credential,
            Err(why) => {
                assert!(!why.is_empty());
                return println!("skipped: no munge daemon: {why}");
            }
        };
        assert!(credential.len() < 1024, "{} bytes", credential.len());
        let (payload, user) = munge.decode(&credential).unwrap();
        assert_eq!((&payload[..], user), (&b"payload"[..], munge.user()));
        let error = munge.decode(&credential).unwrap_err();
        assert!(error.contains("Replayed"), "{error}");
        assert!(munge.decode(b"MUNGE:nonsense:").is_err());
        assert!(munge.decode(b"\0").is_err());
    }

    #[test]
    fn a_missing_daemon_is_named() {
        let Ok(munge) = LibMunge::open(Some(c"/no such socket".into())) else {
            return println!("skipped: no libmunge");
        };
        let error = munge.encode(b"payload").unwrap_err();
        assert!(error.contains("/no such socket"), "{error}");
    }
}
