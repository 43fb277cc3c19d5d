//! How many ranks: `-n`, `--nproc-per-node`, which is torchrun's name for it, or the variable of the latter.

use std::fmt;
use std::str::FromStr;

use crate::plan::Ranks;

/// What `--nproc-per-node` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RanksPerNode {
    /// One for each GPU; one without GPUs: what `-n auto` means.
    GpuOrOne,
    /// One for each GPU; without GPUs one for each core.
    Auto,
    /// One for each GPU.
    Gpu,
    /// One for each core.
    Cpu,
    /// So many, and at least so many after a failure.
    Count { ranks: u32, min: Option<u32> },
}

impl FromStr for RanksPerNode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<u32>().ok();
        let numbers = match text.split_once(':') {
            Some((min, max)) => number(max).zip(number(min).map(Some)),
            None => number(text).map(|ranks| (ranks, None)),
        };
        match (text, numbers) {
            ("auto", _) => Ok(RanksPerNode::Auto),
            ("gpu", _) => Ok(RanksPerNode::Gpu),
            ("cpu", _) => Ok(RanksPerNode::Cpu),
            (_, Some((0, _) | (_, Some(0)))) => Err("at least one rank is needed".into()),
            (_, Some((max, Some(min)))) if min > max => Err(format!("MIN is {min}, and MAX is {max}")),
            (_, Some((ranks, min))) => Ok(RanksPerNode::Count { ranks, min }),
            (_, None) => Err("it should be a number from 1, MIN:MAX, auto, gpu or cpu".into()),
        }
    }
}

impl fmt::Display for RanksPerNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RanksPerNode::Auto | RanksPerNode::GpuOrOne => f.write_str("auto"),
            RanksPerNode::Gpu => f.write_str("gpu"),
            RanksPerNode::Cpu => f.write_str("cpu"),
            RanksPerNode::Count { ranks, min: None } => write!(f, "{ranks}"),
            RanksPerNode::Count { ranks, min: Some(min) } => write!(f, "{min}:{ranks}"),
        }
    }
}

/// The requested number of ranks.
///
/// # Errors
/// If `-n` and `--nproc-per-node` differ, or the value of the variable is invalid.
pub(super) fn requested(
    ranks: Option<Ranks>,
    per_node: Option<RanksPerNode>,
    variable: Option<(&str, String)>,
) -> Result<RanksPerNode, String> {
    let by_short = ranks.map(|ranks| match ranks {
        Ranks::Auto => RanksPerNode::GpuOrOne,
        Ranks::Count(ranks) => RanksPerNode::Count { ranks, min: None },
    });
    match (by_short, per_node, variable) {
        (Some(ranks), Some(per_node), _) if ranks != per_node => Err(format!(
            "-n {ranks} and --nproc-per-node {per_node} are both the number of ranks: leave one of them out"
        )),
        (Some(ranks), _, _) | (None, Some(ranks), _) => Ok(ranks),
        (None, None, Some((name, text))) => {
            text.trim().parse().map_err(|why| format!("the variable {name} is `{text}`: {why}"))
        }
        (None, None, None) => Ok(RanksPerNode::GpuOrOne),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_precede_the_variable() {
        let count = |ranks| RanksPerNode::Count { ranks, min: None };
        let variable = |text: &str| Some(("PET_NPROC_PER_NODE", text.to_owned()));
        assert_eq!(requested(Some(Ranks::Count(2)), None, variable("4")), Ok(count(2)));
        assert_eq!(requested(None, Some(RanksPerNode::Gpu), variable("4")), Ok(RanksPerNode::Gpu));
        assert_eq!(requested(None, None, variable(" 4 ")), Ok(count(4)));
        assert_eq!(requested(None, None, None), Ok(RanksPerNode::GpuOrOne));
        assert_eq!(requested(Some(Ranks::Auto), None, variable("4")), Ok(RanksPerNode::GpuOrOne));
        assert_eq!(requested(None, None, variable("auto")), Ok(RanksPerNode::Auto));
        assert_eq!(requested(Some(Ranks::Count(2)), Some(count(2)), None), Ok(count(2)));
        let error =
            requested(Some(Ranks::Count(2)), Some(RanksPerNode::Count { ranks: 4, min: Some(2) }), None);
        assert!(error.unwrap_err().contains("-n 2 and --nproc-per-node 2:4"));
        let error = requested(None, None, variable("many")).unwrap_err();
        assert_eq!(
            error,
            "the variable PET_NPROC_PER_NODE is `many`: it should be a number from 1, MIN:MAX, auto, gpu or cpu"
        );
    }

    #[test]
    fn numbers_ranges_and_words() {
        for text in ["1", "8", "2:4", "3:3", "auto", "gpu", "cpu"] {
            assert_eq!(text.parse::<RanksPerNode>().unwrap().to_string(), text);
        }
        for text in ["0", "0:2", "4:2", "-1", "2:", ":2", "1:2:3", "", "GPU", "99999999999"] {
            assert!(text.parse::<RanksPerNode>().is_err(), "{text}");
        }
    }
}
