//! Reads batches on a thread, before they are needed.
//!
//! ```text
//! request(batch) ──> advice to the system for each request ──> one request after the other is read ──> next_batch()
//! ```
//!
//! The advice (`POSIX_FADV_WILLNEED`) makes the system read the images of all waiting requests at the same time, so that
//! a disk with a queue is busy; the thread then finds most of them in the system's cache. A batch is memory that was used
//! for an earlier one.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use super::{DataError, Dataset, IMAGE_LEN, Samples};

/// Images that are worth a further thread.
const IMAGES_A_THREAD: usize = 128;

/// A thread that reads batches.
#[derive(Debug)]
pub struct ReadAhead {
    /// `None` while it is dropped.
    requests: Option<Sender<Request>>,
    batches: Receiver<Result<Dataset, DataError>>,
    thread: Option<JoinHandle<()>>,
    /// Requests that were not returned yet.
    waiting: usize,
    /// The last batch that was returned.
    current: Dataset,
    /// Memory for further batches.
    spare: Vec<Dataset>,
}

#[derive(Debug)]
struct Request {
    samples: Vec<u32>,
    into: Dataset,
}

impl ReadAhead {
    /// Starts the thread, which reads large batches with the help of up to `threads - 1` further ones.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(samples: Samples, threads: usize) -> std::io::Result<Self> {
        let (requests, received) = channel();
        let (send, batches) = channel();
        let thread = thread::Builder::new().name("read-ahead".to_owned()).spawn(move || {
            read_all(&samples, threads.max(1), &received, &send);
        })?;
        Ok(ReadAhead {
            requests: Some(requests),
            batches,
            thread: Some(thread),
            waiting: 0,
            current: Dataset::default(),
            spare: Vec::new(),
        })
    }

    /// Requests a batch, to be returned by [`next_batch`](Self::next_batch) after those requested before.
    pub fn request(&mut self, samples: Vec<u32>) {
        let into = self.spare.pop().unwrap_or_default();
        self.waiting += 1;
        if let Some(requests) = &self.requests {
            // If the thread has ended, `next_batch` says so.
            let _ = requests.send(Request { samples, into });
        }
    }

    /// Waits for the oldest batch that was requested.
    ///
    /// # Errors
    /// If it could not be read.
    ///
    /// # Panics
    /// If none was requested, or a request was of samples that do not exist.
    pub fn next_batch(&mut self) -> Result<&Dataset, DataError> {
        assert!(self.waiting > 0, "a batch was requested");
        self.waiting -= 1;
        let batch = self.batches.recv().expect("the thread answers every request")?;
        self.spare.push(std::mem::replace(&mut self.current, batch));
        Ok(&self.current)
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        // The thread ends after the batch that it is reading.
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported there.
            let _ = thread.join();
        }
    }
}

/// Answers requests until there are no more senders.
fn read_all(
    samples: &Samples,
    threads: usize,
    requests: &Receiver<Request>,
    send: &Sender<Result<Dataset, DataError>>,
) {
    let mut queue = VecDeque::new();
    loop {
        // The system learns of all requests before the first one is read.
        let mut accept = |request: Request| {
            samples.will_need(&request.samples);
            queue.push_back(request);
        };
        requests.try_iter().for_each(&mut accept);
        if queue.is_empty() {
            let Ok(request) = requests.recv() else { return };
            samples.will_need(&request.samples);
            queue.push_back(request);
            continue;
        }
        let Some(Request { samples: wanted, mut into }) = queue.pop_front() else { continue };
        let answer = read(samples, threads, &wanted, &mut into).map(|()| into);
        if send.send(answer).is_err() {
            return;
        }
    }
}

/// Reads a batch on several threads if it is large.
fn read(samples: &Samples, threads: usize, wanted: &[u32], batch: &mut Dataset) -> Result<(), DataError> {
    let part = wanted.len().div_ceil(threads).max(IMAGES_A_THREAD);
    if part >= wanted.len() {
        return samples.read(wanted, batch);
    }
    let labels = samples.labels();
    batch.labels.clear();
    batch.labels.extend(wanted.iter().map(|sample| labels[*sample as usize]));
    batch.images.resize(wanted.len() * IMAGE_LEN, 0);
    thread::scope(|scope| {
        let parts = wanted.chunks(part).zip(batch.images.chunks_mut(part * IMAGE_LEN));
        let readers: Vec<_> =
            parts.map(|(wanted, pixels)| scope.spawn(move || samples.read_images(wanted, pixels))).collect();
        readers.into_iter().try_for_each(|reader| reader.join().expect("a reader does not panic"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Split, digits};

    #[test]
    fn batches_come_in_the_order_of_their_requests() {
        let (images, labels) = digits::generate(3, Split::Train, 0..600);
        let set: Samples = Dataset { images, labels }.into();
        for threads in [1, 4] {
            let mut ahead = ReadAhead::new(set.clone(), threads).unwrap();
            let batches = [vec![5, 6, 1], (0..600).rev().collect(), vec![], vec![599]];
            for _ in 0..3 {
                batches.iter().for_each(|batch| ahead.request(batch.clone()));
                for batch in &batches {
                    let mut expected = Dataset::default();
                    set.read(batch, &mut expected).unwrap();
                    assert_eq!(*ahead.next_batch().unwrap(), expected, "{threads} threads");
                }
            }
            // Dropped with requests that nobody waits for.
            batches.iter().for_each(|batch| ahead.request(batch.clone()));
        }
    }
}
