//! Shared parts of a fused update + all-gather: splitting a buffer into segments and blocks.

use std::ops::Range;

use super::call::Update;
use super::{Buffer, shard};
use crate::Result;

/// Calls `update` for the shards of `rank` of `ranks`, block by block, and then `updated` with each block.
pub(super) fn update_blocks(
    buffer: Buffer,
    segments: &[Range<usize>],
    (ranks, rank): (u32, u32),
    block: usize,
    update: &mut Update<'_>,
    mut updated: impl FnMut(usize, &Buffer),
) -> Buffer {
    let (mut done, mut rest) = buffer.split_at(0);
    for (index, segment) in segments.iter().enumerate() {
        let own = shard(segment.len(), ranks, rank);
        let (begin, end) = (segment.start + own.start, segment.start + own.end);
        let (before, behind) = rest.split_at(begin - done.len());
        (done, rest) = (done.join(before), behind);
        while done.len() < end {
            let begin = done.len();
            let (mut next, behind) = rest.split_at(block.min(end - begin));
            update(index, begin, &mut next);
            updated(begin, &next);
            (done, rest) = (done.join(next), behind);
        }
    }
    done.join(rest)
}

/// Replaces each of the segments by the result of `gather`, front to back.
pub(crate) fn gather_segments(
    buffer: Buffer,
    segments: &[Range<usize>],
    mut gather: impl FnMut(Buffer) -> Result<Buffer>,
) -> Result<Buffer> {
    let (mut done, mut rest) = buffer.split_at(0);
    for segment in segments {
        let (before, behind) = rest.split_at(segment.start - done.len());
        let (shards, behind) = behind.split_at(segment.len());
        (done, rest) = (done.join(before).join(gather(shards)?), behind);
    }
    Ok(done.join(rest))
}
