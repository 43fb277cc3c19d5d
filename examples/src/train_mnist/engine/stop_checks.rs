//! Stop checks during an evaluation.
//!
//! All ranks have to make the same number of stop checks (`World::stop_requested`), but they may have different numbers of
//! batches to evaluate. So an evaluation is divided into a fixed number of parts, with a check before each.

use std::ops::Range;

/// Asks whether the ranks should stop. All ranks call it equally often, in the same places. Once it has returned true it
/// keeps returning true.
pub(in super::super) type StopCheck<'a> = dyn FnMut() -> mgpu::Result<bool> + 'a;

/// Number of parts of an evaluation.
const PARTS: usize = 16;

/// Calls `evaluate` with the batches of each part, of `batches` in total, with a stop check before each part. False if the
/// ranks stop: then the rest is left out on all of them.
pub(super) fn evaluate_in_parts(
    batches: usize,
    should_stop: &mut StopCheck<'_>,
    mut evaluate: impl FnMut(Range<usize>) -> mgpu::Result<()>,
) -> mgpu::Result<bool> {
    for part in 0..PARTS {
        if should_stop()? {
            return Ok(false);
        }
        evaluate(part * batches / PARTS..(part + 1) * batches / PARTS)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_is_evaluated_once_with_equally_many_checks() {
        for batches in [0, 1, 15, 16, 17, 100] {
            let (mut checks, mut evaluated) = (0, Vec::new());
            let mut should_stop = || {
                checks += 1;
                Ok(false)
            };
            let all = evaluate_in_parts(batches, &mut should_stop, |part| {
                evaluated.extend(part);
                Ok(())
            });
            assert!(all.unwrap());
            assert_eq!((checks, evaluated), (PARTS, (0..batches).collect::<Vec<_>>()));
        }
        let mut checks = 0;
        let mut should_stop = || {
            checks += 1;
            Ok(checks == 3)
        };
        let mut parts = 0;
        let all = evaluate_in_parts(160, &mut should_stop, |_| {
            parts += 1;
            Ok(())
        });
        assert!(!all.unwrap());
        assert_eq!(parts, 2);
    }
}
