//! What a rank is told about NCCL when it joins.

use serde::{Deserialize, Serialize};

use super::interfaces::{FAMILY_VARIABLE, INTERFACE_VARIABLE};

/// Most notices of an advice.
pub(crate) const MAX_NOTICES: usize = 4;
/// Longest notice in bytes.
pub(crate) const MAX_NOTICE: usize = 1000;
/// Longest value of a variable in bytes.
const MAX_VALUE: usize = 64;

/// Variables of NCCL with their values.
pub type NcclVariables = Vec<(String, String)>;

/// What a rank is told about NCCL.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclAdvice {
    /// Variables to set before NCCL is used.
    #[serde(default)]
    pub variables: NcclVariables,
    /// Sentences for the user.
    #[serde(default)]
    pub notices: Vec<String>,
}

impl NcclAdvice {
    /// Whether an honest server may have said it: it sets nothing but NCCL's interface.
    pub(crate) fn is_plausible(&self) -> bool {
        let is_printable =
            |notice: &String| notice.len() <= MAX_NOTICE && !notice.chars().any(char::is_control);
        are_plausible(&self.variables)
            && self.notices.len() <= MAX_NOTICES
            && self.notices.iter().all(is_printable)
    }
}

/// Whether an honest host may want these variables to be set.
pub(crate) fn are_plausible(variables: &NcclVariables) -> bool {
    let is_plausible = |(name, value): &(String, String)| {
        [INTERFACE_VARIABLE, FAMILY_VARIABLE].contains(&name.as_str())
            && value.len() <= MAX_VALUE
            && !value.chars().any(char::is_control)
    };
    variables.len() <= 2 && variables.iter().all(is_plausible)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_interface_can_be_set() {
        let advice = |name: &str, value: &str| NcclAdvice {
            variables: vec![(name.into(), value.into())],
            notices: Vec::new(),
        };
        assert!(advice(INTERFACE_VARIABLE, "=eth0").is_plausible());
        assert!(advice(FAMILY_VARIABLE, "AF_INET6").is_plausible());
        for (name, value) in
            [("LD_PRELOAD", "x.so"), (INTERFACE_VARIABLE, "a\0b"), (INTERFACE_VARIABLE, &"x".repeat(65))]
        {
            assert!(!advice(name, value).is_plausible(), "{name}");
        }
        let notices =
            |count, length| NcclAdvice { notices: vec!["x".repeat(length); count], ..NcclAdvice::default() };
        assert!(notices(MAX_NOTICES, MAX_NOTICE).is_plausible());
        assert!(!notices(MAX_NOTICES + 1, 1).is_plausible() && !notices(1, MAX_NOTICE + 1).is_plausible());
    }
}
