//! The first host of a list as Slurm writes it: `node[003-7,9],x`, `rack[1-2]-node[01-16]`, `n[1-2]-ib`.
//!
//! Node 0 of a step is the first host of its list, and no other host has to be known. So there is no need to expand the
//! list, which may have thousands of hosts, or to ask `scontrol`.

/// The first host of a list, `None` if the text is not a list. Numbers keep their leading zeros.
pub fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        let (plain, behind) = rest.split_at(end);
        host.push_str(plain);
        let Some(group) = behind.strip_prefix('[') else { break };
        let close = closing_bracket(group)?;
        // Brackets may be nested: the first alternative is a list of its own.
        host.push_str(&first_of_range(&group[..close])?);
        rest = &group[close + 1..];
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    (!host.is_empty() && host.chars().all(is_name)).then_some(host)
}

/// The first value of what stands in brackets: `003` of `003-7,9`.
fn first_of_range(group: &str) -> Option<String> {
    if group.contains('[') {
        return first_host(group);
    }
    let first = group.split(',').next()?;
    let first = match first.split_once('-') {
        Some((from, to)) if is_number(from) && is_number(to) => from,
        Some(_) => return None,
        None => first,
    };
    is_number(first).then(|| first.to_owned())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The index of the bracket that closes the one before `text`.
fn closing_bracket(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b,c", Some("a")),
            ("node[003-7,9],x", Some("node003")),
            ("node[9,003-7]", Some("node9")),
            ("x,node[003-7]", Some("x")),
            ("n[1-2]-ib", Some("n1-ib")),
            ("rack[1-2]-node[01-16]", Some("rack1-node01")),
            ("r[2]n[10,12].cluster", Some("r2n10.cluster")),
            ("n[1[0-3],20]", Some("n10")),
            ("10.0.0.[4-9]", Some("10.0.0.4")),
            (" a,b ", Some("a")),
            ("", None),
            (",a", None),
            ("n[1-2", None),
            ("n[]", None),
            ("n[-3]", None),
            ("n[a-b]", None),
            ("n[1-2]]", None),
            ("a b", None),
            ("None assigned", None),
            ("$(x)", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    /// A prefix, ranges of numbers as first, length and width, and a suffix.
    type Part = (String, Vec<(u32, u32, usize)>, String);

    /// A list as Slurm writes it.
    fn write(parts: &[Part]) -> String {
        let range = |(from, more, width): &(u32, u32, usize)| match more {
            0 => format!("{from:0width$}"),
            more => format!("{from:0width$}-{:0width$}", from + more),
        };
        let part = |(prefix, ranges, suffix): &Part| {
            let ranges: Vec<String> = ranges.iter().map(range).collect();
            match ranges.is_empty() {
                true => format!("{prefix}{suffix}"),
                false => format!("{prefix}[{}]{suffix}", ranges.join(",")),
            }
        };
        parts.iter().map(part).collect::<Vec<_>>().join(",")
    }

    proptest! {
        #[test]
        fn no_text_panics(text in r"[a-c0-3\[\],\- é]{0,24}") {
            let first = first_host(&text);
            prop_assert!(first.is_none_or(|host| !host.is_empty() && !host.contains(['[', ']', ',', ' '])));
        }

        #[test]
        fn the_first_host_is_that_of_the_first_range(
            parts in prop::collection::vec(
                ("[a-z][a-z0-9-]{0,3}", prop::collection::vec((0u32..2000, 0u32..5, 1usize..5), 0..4), r"(|-ib|\.cluster)"),
                1..4,
            )
        ) {
            let (prefix, ranges, suffix) = &parts[0];
            let number = ranges.first().map(|(from, _, width)| format!("{from:0width$}")).unwrap_or_default();
            prop_assert_eq!(first_host(&write(&parts)), Some(format!("{prefix}{number}{suffix}")));
        }
    }
}
