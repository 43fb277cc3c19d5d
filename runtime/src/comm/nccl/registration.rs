//! Buffers that NCCL accesses in place.
//!
//! By default NCCL copies a buffer in pieces through memory of its own, which its peers can access. Registered memory is
//! accessed in place, by peers over NVLink, by network adapters, and by the switches that add up (NVLS); a collective then
//! needs fewer multiprocessors, which the model's kernels use meanwhile. There are two kinds:
//!
//! | | since | registered by | gives |
//! |---|---|---|---|
//! | [`Registered`](BufferAccess::Registered) | 2.19 | `ncclCommRegister`, each rank alone | the usual algorithms without their copies |
//! | [`Window`](BufferAccess::Window) | 2.27 | `ncclCommWindowRegister`, all ranks together | also kernels of their own for short sums, between GPUs of one host |
//!
//! The memory is from `ncclMemAlloc`, which shares physical memory with peers; of the driver's own memory NCCL registers
//! little. NCCL leaves undefined what happens if one rank's buffer of a collective is registered and another's is not, or
//! at other offsets. So the ranks tell each other what has succeeded, also those that are not to register anything, and all
//! of them use plain memory if one cannot register.
//!
//! A window is different: it connects the ranks, and if that fails, the communicator can only be aborted. All ranks then
//! connect a new one in its place, and try no window again. What can be told beforehand is compared before the call, in
//! which the others would wait for a rank that does not make it.
//!
//! Registrations end before their communicator does. An abort ends them, too: calls on a communicator that has failed
//! could hang.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mgpu_kernels::cuda::{Deallocator, Memory, View};
use nccl_sys::Library;

use super::DeviceCommunicator;
use super::link::{Link, WaitContext};
use super::owner::{Owner, error_text};
use crate::comm::DType;
use crate::progress::Operation;
use crate::{Error, Result};

/// How NCCL accesses the memory of a buffer: the same on all ranks of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BufferAccess {
    /// In place, and peers load and store it directly.
    Window,
    /// In place, by the algorithms that can.
    Registered,
    /// By copies, because nothing else was wanted: for this reason.
    Copied(&'static str),
    /// By copies, because registering has failed on some rank: for this reason.
    Failed(String),
}

impl fmt::Display for BufferAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BufferAccess::Window => f.write_str("in place (window)"),
            BufferAccess::Registered => f.write_str("in place (registered)"),
            BufferAccess::Copied(reason) => write!(f, "by copies ({reason})"),
            BufferAccess::Failed(reason) => write!(f, "by copies (not registered: {reason})"),
        }
    }
}

/// Whether a communicator registers buffers.
#[derive(Debug, Clone)]
pub(crate) struct RegistrationPolicy {
    /// Why it does not.
    pub(crate) off: Option<&'static str>,
    /// A window has failed: the others are not tried.
    no_windows: Arc<AtomicBool>,
}

impl RegistrationPolicy {
    /// `enabled` by the user; `share_gpus`: several ranks may be on one GPU.
    pub(crate) fn new(enabled: bool, share_gpus: bool) -> Self {
        let off = match (enabled, share_gpus) {
            (false, _) => Some("MGPU_NCCL_REGISTER=off"),
            // They have no peer access, and NCCL sends their data through the host.
            (true, true) => Some("ranks may share a GPU"),
            (true, false) => None,
        };
        RegistrationPolicy { off, no_windows: Arc::default() }
    }
}

/// The registration of a buffer with a communicator. Dropping it ends it.
#[derive(Debug)]
pub struct Registration {
    access: BufferAccess,
    entry: Option<Entry>,
}

/// What an owner has registered.
#[derive(Debug)]
struct Entry {
    owner: Arc<Owner>,
    number: u64,
    /// A forked child has a copy, but not the owner's thread.
    process: u32,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.owner.deregister(self.number);
        }
    }
}

impl Registration {
    /// How NCCL accesses the buffer.
    pub fn access(&self) -> &BufferAccess {
        &self.access
    }

    fn none(access: BufferAccess) -> Self {
        Registration { access, entry: None }
    }
}

/// Memory for buffers of a communicator's operations, registered if possible.
#[derive(Debug)]
pub(crate) struct RegisteredMemory {
    registration: Registration,
    memory: ManuallyDrop<Memory>,
    /// The memory is not freed.
    is_kept: bool,
}

impl RegisteredMemory {
    fn new(registration: Registration, memory: Memory) -> Self {
        RegisteredMemory { registration, memory: ManuallyDrop::new(memory), is_kept: false }
    }

    /// Memory that no operation of NCCL uses.
    pub(crate) fn plain(memory: Memory) -> Self {
        Self::new(Registration::none(BufferAccess::Copied("NCCL does not use it")), memory)
    }

    /// How NCCL accesses it.
    pub(crate) fn access(&self) -> &BufferAccess {
        &self.registration.access
    }

    /// Never frees the memory if it is NCCL's, because work that uses it may not have ended. The driver would wait for
    /// that work.
    pub(crate) fn keep(&mut self) {
        self.is_kept = self.registration.entry.is_some();
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        // Before the memory is freed.
        self.registration.entry = None;
        if !self.is_kept {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

impl Deref for RegisteredMemory {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

/// Frees memory of `ncclMemAlloc`.
#[derive(Debug)]
struct NcclMemory(Library);

impl NcclMemory {
    /// For all memory of this process, which has one library.
    fn of(library: &Library) -> &'static NcclMemory {
        static MEMORY: OnceLock<NcclMemory> = OnceLock::new();
        MEMORY.get_or_init(|| NcclMemory(library.clone()))
    }
}

impl Deallocator for NcclMemory {
    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's promise; it was deregistered before, or the communicator is gone.
        let _ = unsafe { self.0.mem_free(address as *mut c_void) };
    }
}

/// What there is in a world of one without NCCL.
const ALONE: BufferAccess = BufferAccess::Copied("a single rank");

/// What a rank tells the others: whether it has registered its memory, whether that can become a window, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offer {
    is_registered: bool,
    may_be_window: bool,
    bytes: usize,
}

impl Offer {
    fn encode(self) -> [i64; 3] {
        [self.is_registered.into(), self.may_be_window.into(), self.bytes as i64]
    }

    fn decode(words: &[i64]) -> Self {
        let &[registered, window, bytes] = words else { unreachable!("three words for each rank") };
        Offer { is_registered: registered == 1, may_be_window: window == 1, bytes: bytes as usize }
    }
}

/// Why ranks with these offers cannot use registered memory, if they cannot. `rank_name` names a rank.
fn obstacle(offers: &[Offer], rank_name: impl Fn(usize) -> u32) -> Option<String> {
    if let Some(rank) = offers.iter().position(|offer| !offer.is_registered) {
        return Some(format!("rank {} cannot register its memory", rank_name(rank)));
    }
    let first = offers.first()?.bytes;
    let other = offers.iter().position(|offer| offer.bytes != first)?;
    let (ranks, bytes) = ([rank_name(0), rank_name(other)], offers[other].bytes);
    Some(format!("rank {} has {first} bytes, and rank {} has {bytes}", ranks[0], ranks[1]))
}

impl DeviceCommunicator {
    /// Registers a buffer that operations of this communicator use again and again, so that NCCL can access it in place.
    /// Collective: every rank registers a buffer of the same size, and uses it in the same operations at the same
    /// offsets. If some rank's cannot be registered, none is, and operations copy as before: [`Registration::access`] says
    /// so. Nothing is registered in a world of one without NCCL, with `MGPU_NCCL_REGISTER=off`, or if ranks share GPUs.
    ///
    /// NCCL makes little use of memory from the driver's `cuMemAlloc`: the buffer should be from `ncclMemAlloc`, or another
    /// allocator of physical memory that can be shared (for PyTorch, a pool of `torch.cuda.MemPool` with NCCL's allocator).
    ///
    /// # Safety
    /// The memory stays allocated until the registration is dropped. By then all work that uses it has ended, and graphs
    /// of it are not launched any more.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn register(&self, buffer: View<'_>) -> Result<Registration> {
        let Some(link) = self.link() else { return Ok(Registration::none(ALONE)) };
        let range = (buffer.address(), buffer.bytes());
        let registered = match link.registration.off {
            Some(reason) => Err(BufferAccess::Copied(reason)),
            None if buffer.is_empty() => Err(BufferAccess::Failed("the buffer is empty".into())),
            None => link.register(range)?,
        };
        let (registration, _) = self.compare(link, registered, range.1, false)?;
        Ok(registration)
    }

    /// Memory of `len` elements, all zero, registered if possible. Collective: every rank allocates as many bytes.
    ///
    /// # Safety
    /// All work that uses it has ended when it is dropped, and graphs of it are not launched any more.
    ///
    /// # Errors
    /// If memory is short; as [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn allocate(&self, dtype: DType, len: usize) -> Result<RegisteredMemory> {
        let plain = || Memory::zeroed(self.device(), dtype, len);
        let Some(link) = self.link() else {
            return Ok(RegisteredMemory::new(Registration::none(ALONE), plain()?));
        };
        let bytes = (len * dtype.size()).max(1);
        let (memory, registered) = match link.allocate(bytes) {
            Err(access) => (None, Err(access)),
            Ok(address) => {
                let deallocator = NcclMemory::of(&link.owner.library());
                // SAFETY: NCCL has just allocated these bytes, aligned to more than that; the rest is the caller's promise.
                let memory = unsafe { Memory::zeroed_at(address, self.device(), dtype, len, deallocator)? };
                (Some(memory), link.register((address, bytes))?)
            }
        };
        let may_be_window = link.may_have_windows();
        let (mut registration, all_may) = self.compare(link, registered, bytes, may_be_window)?;
        let Some(memory) = memory.filter(|_| registration.entry.is_some()) else {
            return Ok(RegisteredMemory::new(registration, plain()?));
        };
        if all_may {
            self.open_window(link, &mut registration, (memory.view().address(), bytes))?;
        }
        Ok(RegisteredMemory::new(registration, memory))
    }

    /// Compares what the ranks have registered, and undoes it unless all have. Also returns whether all can open windows.
    fn compare(
        &self,
        link: &Link,
        registered: std::result::Result<Entry, BufferAccess>,
        bytes: usize,
        may_be_window: bool,
    ) -> Result<(Registration, bool)> {
        let own = Offer { is_registered: registered.is_ok(), may_be_window, bytes };
        let words = self.gather_words(&own.encode(), "the registration of buffers")?;
        let offers: Vec<Offer> = words.chunks(own.encode().len()).map(Offer::decode).collect();
        let obstacle = obstacle(&offers, |rank| link.members.world_rank(rank as u32));
        let registration = match (registered, obstacle) {
            (Ok(entry), None) => Registration { access: BufferAccess::Registered, entry: Some(entry) },
            (Ok(_), Some(reason)) => Registration::none(BufferAccess::Failed(reason)),
            (Err(access), _) => Registration::none(access),
        };
        let all_may = registration.entry.is_some() && offers.iter().all(|offer| offer.may_be_window);
        Ok((registration, all_may))
    }

    /// Opens a window on registered memory. If that fails, the communicator is replaced.
    fn open_window(&self, link: &Link, registration: &mut Registration, range: (u64, usize)) -> Result<()> {
        let Some(number) = registration.entry.as_ref().map(|entry| entry.number) else { return Ok(()) };
        let text = "the registration of a window".to_owned();
        let context = WaitContext { text, ..link.registration_context(range.1) };
        let opened =
            link.during(&context, || match link.answer(&link.owner.open_window(number, range), &context) {
                Err(Error::Nccl { problem, .. }) => {
                    link.replace_communicator(&problem, &context).map(|()| false)
                }
                other => other,
            })?;
        // A null window is no error: the GPUs cannot access each other.
        let all = self.gather_words(&[opened.into()], "the registration of buffers")?;
        if all.iter().all(|opened| *opened == 1) {
            registration.access = BufferAccess::Window;
        } else if opened {
            link.owner.close_window(number);
        }
        Ok(())
    }
}

/// How long a rank whose window has failed waits for the same failure of the others, if their own wait is longer.
const REPLACE_LIMIT: Duration = Duration::from_secs(10);

impl Link {
    fn registration_context(&self, bytes: usize) -> WaitContext {
        WaitContext {
            operation: Operation::Connect,
            sequence: 0,
            bytes,
            text: "the registration of buffers".into(),
            peers: self.peers(),
            messages: None,
        }
    }

    /// Memory of NCCL; or why there is none.
    fn allocate(&self, bytes: usize) -> std::result::Result<u64, BufferAccess> {
        if let Some(reason) = self.registration.off {
            return Err(BufferAccess::Copied(reason));
        }
        let nccl = self.owner.library();
        if !nccl.has_registration() {
            let version = nccl.version().map(|version| format!(" {version}")).unwrap_or_default();
            return Err(BufferAccess::Failed(format!("NCCL{version} is too old; 2.19 or newer can")));
        }
        let failed = |error| BufferAccess::Failed(error_text(&nccl, &error));
        nccl.mem_alloc(bytes).map(|address| address as u64).map_err(failed)
    }

    /// Registers memory on this rank. The inner error says why NCCL does not.
    fn register(&self, (address, bytes): (u64, usize)) -> Result<std::result::Result<Entry, BufferAccess>> {
        let context = self.registration_context(bytes);
        let number = self.during(&context, || self.answer(&self.owner.register(address, bytes), &context))?;
        let entry = |number| Entry { owner: Arc::clone(&self.owner), number, process: std::process::id() };
        Ok(number.map(entry).map_err(BufferAccess::Failed))
    }

    /// Whether this rank can open windows. They are only of use between several GPUs of one host.
    fn may_have_windows(&self) -> bool {
        let failed = self.registration.no_windows.load(Ordering::Relaxed);
        let is_of_use = self.members.size() > 1 && !self.has_remote_members();
        is_of_use && !failed && self.owner.library().has_windows()
    }

    /// Replaces the communicator, which a window has made unusable on all ranks, by a new one without windows. Returns an
    /// error that contains `problem` if the others have no such failure, or if graphs use the communicator.
    fn replace_communicator(&self, problem: &str, context: &WaitContext) -> Result<()> {
        let lost = |why: &str| Error::Nccl {
            rank: self.rank(),
            operation: self.describe(context),
            problem: format!("{problem}{why}; MGPU_NCCL_REGISTER=off avoids it"),
        };
        if self.owner.has_captured() {
            return Err(lost(""));
        }
        let (store, name) = (self.membership.store(), format!("{}/no-window", self.key));
        // Before the others' timeout, so that they see which rank has failed.
        let limit = REPLACE_LIMIT.min(self.timeout / 2);
        if store.barrier_of(&name, self.members.world_ranks(), limit).is_err() {
            return Err(lost(", but not on all ranks"));
        }
        self.registration.no_windows.store(true, Ordering::Relaxed);
        self.answer(&self.owner.discard(), context)?;
        let id = self.share_id("id-without-windows", context)?;
        let (size, rank) = (self.members.size(), self.members.rank());
        self.answer(&self.owner.init(id, size, rank), context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_survive_the_exchange() {
        for (is_registered, may_be_window) in [(true, false), (false, true)] {
            let offer = Offer { is_registered, may_be_window, bytes: 1 << 40 };
            assert_eq!(Offer::decode(&offer.encode()), offer);
        }
    }

    #[test]
    fn all_ranks_register_the_same_size_or_none_does() {
        let offer = |is_registered, bytes| Offer { is_registered, may_be_window: true, bytes };
        let name = |rank: usize| rank as u32 + 4;
        assert_eq!(obstacle(&[offer(true, 8), offer(true, 8)], name), None);
        let failed = [offer(true, 8), offer(false, 4)];
        assert_eq!(obstacle(&failed, name).unwrap(), "rank 5 cannot register its memory");
        let unequal = [offer(true, 8), offer(true, 8), offer(true, 4)];
        assert_eq!(obstacle(&unequal, name).unwrap(), "rank 4 has 8 bytes, and rank 6 has 4");
    }
}
