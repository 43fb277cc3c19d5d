//! The trace event format: a JSON object with one event per line.
//!
//! To the viewer, all ranks are threads of one process, so that their tracks are shown together, with each rank's
//! background reductions below its own track. Every span is a complete event (`"ph":"X"`) in microseconds since the
//! first span of any rank, with three decimals, so that nothing is rounded. Outer spans come before inner ones.

use std::cmp::Reverse;
use std::io::{self, Write};

use super::gather::{Track, TrackSpan};

/// The process that all ranks belong to, for the viewer.
const PROCESS: u32 = 1;

/// Writes the whole file to `out`.
pub(super) fn write(tracks: &[Track], out: &mut impl Write) -> io::Result<()> {
    let spans = tracks.iter().flat_map(|track| &track.spans);
    let zero = spans.map(|span| span.begin).min().unwrap_or(0);
    let left_out: Vec<u64> = tracks.iter().map(|track| track.left_out).collect();
    writeln!(out, r#"{{"displayTimeUnit":"ms","otherData":{{"left_out":{left_out:?}}},"traceEvents":["#)?;
    write!(out, r#"{{"ph":"M","pid":{PROCESS},"name":"process_name","args":{{"name":"ranks"}}}}"#)?;
    for (rank, track) in tracks.iter().enumerate() {
        let own = TrackHeader { title: format!("rank {rank}"), thread: thread(rank), order: 2 * rank, zero };
        write_track(&own, track, false, out)?;
        if track.spans.iter().any(|span| span.background) {
            let title = format!("rank {rank}, reductions");
            let below = TrackHeader { title, thread: tracks.len() + own.thread, order: own.order + 1, zero };
            write_track(&below, track, true, out)?;
        }
        if track.left_out > 0 {
            let end = Micros(track.spans.iter().map(|span| span.end).max().unwrap_or(zero) - zero);
            let text = format!("the record is full: {} later spans left out", track.left_out);
            let thread = thread(rank);
            writeln!(out, ",")?;
            write!(out, r#"{{"ph":"i","s":"t","pid":{PROCESS},"tid":{thread},"ts":{end},"name":"{text}"}}"#)?;
        }
    }
    writeln!(out, "\n]}}")
}

/// Thread id of a rank's own track. Viewers treat thread 0 as the idle thread.
fn thread(rank: usize) -> usize {
    rank + 1
}

/// Title and position of a track in the viewer.
struct TrackHeader {
    title: String,
    /// Thread id, and position among all tracks.
    thread: usize,
    order: usize,
    /// Start of the trace.
    zero: u64,
}

/// Writes a rank's own spans, or those of its background reductions.
fn write_track(
    header: &TrackHeader,
    track: &Track,
    background: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let &TrackHeader { ref title, thread, order, zero } = header;
    let about = |name, value: &str| {
        format!(r#"{{"ph":"M","pid":{PROCESS},"tid":{thread},"name":"{name}","args":{{{value}}}}}"#)
    };
    write!(out, ",\n{}", about("thread_name", &format!(r#""name":"{title}""#)))?;
    write!(out, ",\n{}", about("thread_sort_index", &format!(r#""sort_index":{order}"#)))?;
    let of_thread = track.spans.iter().enumerate().filter(|(_, span)| span.background == background);
    let mut order: Vec<(usize, &TrackSpan)> = of_thread.collect();
    // Of spans with the same times, the outer one was recorded later.
    order.sort_by_key(|(index, span)| (span.begin, Reverse(span.end), Reverse(*index)));
    let names: Vec<String> = track.names.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    for (_, span) in order {
        let (begin, duration) = (Micros(span.begin - zero), Micros(span.end - span.begin));
        let name = &names[span.name];
        writeln!(out, ",")?;
        write!(
            out,
            r#"{{"ph":"X","pid":{PROCESS},"tid":{thread},"ts":{begin},"dur":{duration},"name":{name}"#
        )?;
        write_arguments(span, &track.names[span.name], out)?;
        write!(out, "}}")?;
    }
    Ok(())
}

fn write_arguments(span: &TrackSpan, name: &str, out: &mut impl Write) -> io::Result<()> {
    // The title of a group follows the name.
    let key = match name.split(", ").next().unwrap_or(name) {
        "step" => "step",
        "all_reduce" | "reduce_scatter" => "bucket",
        "forward" | "backward" => "micro_batch",
        _ => "number",
    };
    match (span.number, span.bytes) {
        (None, 0) => Ok(()),
        (None, bytes) => write!(out, r#","args":{{"bytes":{bytes}}}"#),
        (Some(number), 0) => write!(out, r#","args":{{"{key}":{number}}}"#),
        (Some(number), bytes) => write!(out, r#","args":{{"{key}":{number},"bytes":{bytes}}}"#),
    }
}

/// Nanoseconds, displayed as microseconds.
struct Micros(u64);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn span(name: usize, number: Option<u32>, (begin, end): (u64, u64), bytes: u64) -> TrackSpan {
        TrackSpan { begin, end, bytes, name, number, background: false }
    }

    #[test]
    fn tracks_are_per_rank_and_outer_spans_come_first() {
        let names = ["step", "a \"quoted\" name", "all_reduce"].map(String::from).to_vec();
        let spans = vec![
            span(2, Some(4), (2_000_500, 2_000_600), 64),
            span(1, None, (2_000_500, 2_003_000), 0),
            span(0, Some(9), (2_000_500, 2_003_000), 0),
            TrackSpan { background: true, ..span(2, Some(5), (2_001_500, 2_003_500), 32) },
        ];
        let full = Track { names: names.clone(), spans, left_out: 0 };
        let late = Track { names, spans: vec![span(1, None, (3_000_001, 3_000_001), 5)], left_out: 12 };
        let mut text = Vec::new();
        write(&[full, late], &mut text).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(file["otherData"]["left_out"], json!([0, 12]));
        let events = file["traceEvents"].as_array().unwrap();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        let named: Vec<_> = of("M").into_iter().filter(|event| event["name"] == "thread_name").collect();
        let tracks: Vec<_> = named.iter().map(|event| (&event["tid"], &event["args"]["name"])).collect();
        assert_eq!(
            tracks,
            [
                (&json!(1), &json!("rank 0")),
                (&json!(3), &json!("rank 0, reductions")),
                (&json!(2), &json!("rank 1"))
            ]
        );
        let spans: Vec<_> = of("X")
            .into_iter()
            .map(|event| {
                (event["tid"].as_u64(), event["name"].as_str().unwrap(), &event["ts"], &event["dur"])
            })
            .collect();
        assert_eq!(
            spans,
            [
                (Some(1), "step", &json!(0.0), &json!(2.5)),
                (Some(1), "a \"quoted\" name", &json!(0.0), &json!(2.5)),
                (Some(1), "all_reduce", &json!(0.0), &json!(0.1)),
                (Some(3), "all_reduce", &json!(1.0), &json!(2.0)),
                (Some(2), "a \"quoted\" name", &json!(999.501), &json!(0.0)),
            ]
        );
        let arguments: Vec<_> = of("X").into_iter().map(|event| &event["args"]).collect();
        let none = Value::Null;
        assert_eq!(
            arguments,
            [
                &json!({"step": 9}),
                &none,
                &json!({"bucket": 4, "bytes": 64}),
                &json!({"bucket": 5, "bytes": 32}),
                &json!({"bytes": 5})
            ]
        );
        let left_out = of("i");
        assert_eq!((left_out.len(), left_out[0]["tid"].as_u64()), (1, Some(2)));
        assert!(left_out[0]["name"].as_str().unwrap().contains("12 later spans left out"), "{left_out:?}");
    }
}
