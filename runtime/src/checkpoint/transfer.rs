//! Sends the files of a checkpoint to other hosts.
//!
//! All ranks know the manifest first, and so the names and sizes of the files. The files follow in the manifest's order,
//! in pieces, from one rank to each receiver. After every round of pieces all ranks agree that it has succeeded: then a
//! full disk ends the transfer early, and ranks that only wait never wait for longer than a round.
//!
//! A receiver compares sizes and checksums with the manifest as the bytes arrive, and writes the manifest last, so the
//! received checkpoint is published under the same rules as one written here (`publish`).

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::agreement::agree;
use super::files::{self, check_checksum, check_size, unreadable};
use super::folder::Folder;
use super::manifest::{FileEntry, Manifest};
use super::{failed, publish};
use crate::Result;
use crate::comm::{Buffer, Communicator};

/// Length of a piece in bytes.
const PIECE: u64 = 1 << 20;

/// Pieces of a round.
const ROUND: usize = 64;

/// Who sends to whom; ranks of the world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route<'a> {
    pub(super) from: u32,
    pub(super) to: &'a [u32],
}

/// What this rank does in a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part<'a> {
    /// It sends the checkpoint in this folder.
    Sender(&'a Path),
    /// It writes into this folder.
    Receiver(&'a Folder),
    /// It only takes part in the agreements.
    Onlooker,
}

/// Sends a checkpoint along `route`. `folder` and `host` are those of this rank, for errors. Returns on a receiver what
/// it has received, complete and equal to its manifest. Collective.
pub(super) fn transfer(
    comm: &mut Communicator,
    (folder, host): (&Path, usize),
    route: Route<'_>,
    part: Part<'_>,
) -> Result<Option<Received>> {
    let text = match part {
        Part::Sender(path) => files::read_manifest_text(path),
        Part::Receiver(_) | Part::Onlooker => Ok(Vec::new()),
    };
    let text = agree(comm, folder, host, text)?;
    let text = comm.broadcast_bytes(&text, route.from)?;
    let end = files::parse_manifest(folder, &text).and_then(|manifest| {
        Ok(match part {
            Part::Sender(path) => (End::Sender(OpenFile::new(path)), manifest),
            Part::Receiver(folder) => {
                (End::Receiver(Box::new(Received::begin(folder, &manifest, text)?)), manifest)
            }
            Part::Onlooker => (End::Onlooker, manifest),
        })
    });
    let (mut end, manifest) = agree(comm, folder, host, end)?;
    let mut pieces = pieces(&manifest).peekable();
    while pieces.peek().is_some() {
        let mut moved = Ok(());
        for piece in pieces.by_ref().take(ROUND) {
            // Even after an error, since the peers count on all pieces of the round.
            let result = end.move_piece(comm, route, &piece)?;
            moved = moved.and(result);
        }
        agree(comm, folder, host, moved)?;
    }
    Ok(match end {
        End::Receiver(received) => Some(*received),
        End::Sender(_) | End::Onlooker => None,
    })
}

/// A part of a file.
struct Piece<'a> {
    name: &'a str,
    entry: &'a FileEntry,
    begin: u64,
    len: usize,
}

impl Piece<'_> {
    fn is_last(&self) -> bool {
        self.begin + self.len as u64 == self.entry.bytes
    }
}

/// The pieces of all files; an empty file has one piece.
fn pieces(manifest: &Manifest) -> impl Iterator<Item = Piece<'_>> {
    manifest.files.iter().flat_map(|(name, entry)| {
        (0..entry.bytes.div_ceil(PIECE).max(1)).map(move |piece| {
            let begin = piece * PIECE;
            Piece { name, entry, begin, len: (entry.bytes - begin).min(PIECE) as usize }
        })
    })
}

/// One end of a transfer.
enum End {
    Sender(OpenFile),
    Receiver(Box<Received>),
    Onlooker,
}

impl End {
    /// Moves a piece. The outer error is the communicator's, the inner one that of a file.
    fn move_piece(
        &mut self,
        comm: &mut Communicator,
        route: Route<'_>,
        piece: &Piece<'_>,
    ) -> Result<Result<()>> {
        let mut buffer = Buffer::zeroed::<u8>(if matches!(self, End::Onlooker) { 0 } else { piece.len });
        match self {
            End::Sender(file) => {
                let read = file.read(piece, buffer.as_mut_slice());
                for to in route.to {
                    buffer = comm.send(buffer, *to)?.wait()?;
                }
                Ok(read)
            }
            End::Receiver(received) => {
                let buffer = comm.recv(buffer, route.from)?.wait()?;
                Ok(received.write(piece, buffer.as_slice()))
            }
            End::Onlooker => Ok(Ok(())),
        }
    }
}

/// The file of a checkpoint that is being sent.
struct OpenFile {
    folder: PathBuf,
    file: Option<io::Take<File>>,
}

impl OpenFile {
    fn new(folder: &Path) -> Self {
        OpenFile { folder: folder.to_owned(), file: None }
    }

    fn read(&mut self, piece: &Piece<'_>, bytes: &mut [u8]) -> Result<()> {
        let path = self.folder.join(piece.name);
        if piece.begin == 0 {
            let (file, size) = files::open(&path)?;
            check_size(&path, piece.entry, size)?;
            self.file = Some(file);
        }
        match &mut self.file {
            Some(file) => file.read_exact(bytes).map_err(|error| unreadable(&path, &error)),
            // An error was returned for an earlier piece.
            None => Ok(()),
        }
    }
}

/// A checkpoint that was received, or is being received, under its hidden name. Dropping it before it is
/// [flushed](Self::flush) removes it.
pub(super) struct Received {
    partial: PathBuf,
    step: u64,
    manifest: Vec<u8>,
    /// The files so far, with their paths.
    files: Vec<(PathBuf, File)>,
    hash: Xxh3,
    /// A write has failed, so the rest is not written.
    has_failed: bool,
    is_flushed: bool,
}

impl Received {
    fn begin(folder: &Folder, manifest: &Manifest, text: Vec<u8>) -> Result<Self> {
        Ok(Received {
            partial: publish::begin(folder, manifest.step)?,
            step: manifest.step,
            manifest: text,
            files: Vec::new(),
            hash: Xxh3::new(),
            has_failed: false,
            is_flushed: false,
        })
    }

    /// The step of the checkpoint.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Writes a piece, and compares the checksum after the last one of a file.
    fn write(&mut self, piece: &Piece<'_>, bytes: &[u8]) -> Result<()> {
        if self.has_failed {
            return Ok(());
        }
        let written = self.try_write(piece, bytes);
        self.has_failed = written.is_err();
        written
    }

    fn try_write(&mut self, piece: &Piece<'_>, bytes: &[u8]) -> Result<()> {
        let path = self.partial.join(piece.name);
        if piece.begin == 0 {
            let file = File::create_new(&path).map_err(|error| failed(&path, error))?;
            self.files.push((path.clone(), file));
            self.hash.reset();
        }
        if let Some((_, file)) = self.files.last_mut() {
            file.write_all(bytes).map_err(|error| failed(&path, error))?;
        }
        self.hash.update(bytes);
        if piece.is_last() { check_checksum(&path, piece.entry, self.hash.digest()) } else { Ok(()) }
    }

    /// Flushes all files to disk, the manifest last, and then the folder.
    pub(super) fn flush(mut self) -> Result<()> {
        for (path, file) in &self.files {
            file.sync_all().map_err(|error| failed(path, error))?;
        }
        files::write_manifest(&self.partial, &self.manifest)?;
        self.is_flushed = true;
        Ok(())
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if self.is_flushed {
            return;
        }
        // The disk may be full: free the space. These files were all created here.
        let manifest = self.partial.join(super::manifest::MANIFEST);
        for path in self.files.iter().map(|(path, _)| path).chain([&manifest]) {
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_dir(&self.partial);
    }
}
