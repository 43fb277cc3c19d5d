//! Times on the command line: `90`, `30s`, `90m`, `1h30m`, `2d`.

use std::time::Duration;

use crate::launch::MAX_DURATION;

/// Seconds of each unit.
const UNITS: [(char, f64); 4] = [('d', 86_400.0), ('h', 3_600.0), ('m', 60.0), ('s', 1.0)];

/// A time: numbers with units, added up, or one number of seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let seconds = match text.parse() {
        Ok(seconds) => Some(seconds),
        Err(_) => sum_of_parts(text),
    };
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration
        .filter(|duration| *duration <= MAX_DURATION)
        .ok_or_else(|| "it should be a time such as 2h, 90m, 1h30m, or a number of seconds".into())
}

/// The seconds of `1h30m`. Each unit occurs once, the largest first.
fn sum_of_parts(text: &str) -> Option<f64> {
    let (mut rest, mut sum) = (text, 0.0);
    for (unit, seconds) in UNITS {
        if let Some((number, after)) = rest.split_once(unit) {
            sum += number.parse::<f64>().ok()? * seconds;
            rest = after;
        }
    }
    (rest.is_empty() && !text.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_parsed() {
        for (text, seconds) in
            [("90", 90.0), ("0.5", 0.5), ("2h", 7200.0), ("1h30m", 5400.0), ("1d2h3m4.5s", 93_784.5)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in ["", "h", "2x", "30m1h", "1h1h", "-5", "-1h", "1h30", "nan", "inf", "1e300d", "2 h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_texts_never_panic(text in ".{0,12}") {
            let _ = parse_duration(&text);
        }
    }
}
