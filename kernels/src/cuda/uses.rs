//! When the streams that use something have last used it.
//!
//! Freeing pinned memory waits for nothing, and waiting for the whole context is illegal while any of its streams is
//! captured. So each use is followed by an event, and whoever frees waits for these events.

use super::error::Result;
use super::{Event, Stream};

/// The last use on each stream, by the stream's number.
#[derive(Debug, Default)]
pub(super) struct LastUses(Vec<(u64, Event)>);

impl LastUses {
    /// Notes that the work which `stream` has so far is a use. Returns false, and notes nothing, if the stream is being
    /// captured: the use then belongs to a graph.
    pub(super) fn record(&mut self, stream: &Stream) -> Result<bool> {
        if stream.is_capturing()? {
            return Ok(false);
        }
        let known = self.0.iter().position(|(number, _)| *number == stream.number());
        let at = match known {
            Some(at) => at,
            None => {
                self.0.push((stream.number(), Event::new(stream.device())?));
                self.0.len() - 1
            }
        };
        stream.record(&self.0[at].1)?;
        Ok(true)
    }

    /// Returns once all uses have ended.
    pub(super) fn wait(&self) -> Result<()> {
        self.0.iter().try_for_each(|(_, event)| event.synchronize())
    }
}
