use clap::Parser;

use super::*;
use crate::output::Stream;

/// What the command line and the variables mean for the launch and its only job.
fn settings(line: &str, variables: &[(&str, &str)]) -> Result<(LaunchSettings, JobSettings), SettingsError> {
    let words = line.split(' ').map(std::ffi::OsString::from).collect();
    let line = CommandLine::try_parse_from(join_tee_values(words)).unwrap();
    let variable = |name: &str| {
        let found = variables.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let surroundings = Surroundings { variable: &variable, file: &|_| None };
    let is_torchrun = is_torchrun(&line);
    Ok((
        LaunchSettings::new(&line, is_torchrun, &surroundings)?,
        JobSettings::new(&line.ranks, is_torchrun, &surroundings)?,
    ))
}

fn refusal(line: &str, variables: &[(&str, &str)]) -> String {
    settings(line, variables).unwrap_err().to_string()
}

/// A variable for each option, with underscores in the options.
const LINES: [(&str, &[(&str, &str)]); 9] = [
    ("mgpurun --max_restarts 3 x", &[("PET_MAX_RESTARTS", "3")]),
    ("mgpurun --shutdown_timeout 30 x", &[("PET_SHUTDOWN_TIMEOUT", "30")]),
    ("mgpurun --local_ranks_filter 0,2 x", &[("PET_LOCAL_RANKS_FILTER", "0,2")]),
    ("mgpurun --signals_to_handle SIGXCPU x", &[("PET_SIGNALS_TO_HANDLE", "SIGXCPU")]),
    ("mgpurun -r 0:1 --tee 1:2 x", &[("PET_REDIRECTS", "0:1"), ("PET_TEE", "1:2")]),
    ("mgpurun --role trainer x", &[("PET_ROLE", "trainer")]),
    ("mgpurun --virtual_local_rank x", &[("PET_VIRTUAL_LOCAL_RANK", "1")]),
    ("mgpurun --numa_binding core-complex x", &[("PET_NUMA_BINDING", "core-complex")]),
    ("mgpurun --run_path x", &[("PET_RUN_PATH", "1")]),
];

#[test]
fn a_variable_sets_what_its_option_sets() {
    for (line, variables) in LINES {
        let (mut by_flag, mut by_variable) =
            (settings(line, &[]).unwrap(), settings("mgpurun x", variables).unwrap());
        // Only an option makes the line one of torchrun.
        for (launch, job) in [&mut by_flag, &mut by_variable] {
            launch.output.tee = false;
            job.style = match job.style {
                Style::Any { .. } => Style::Any { python: false },
                style => style,
            };
        }
        assert_eq!(by_flag, by_variable, "{line}");
        assert_ne!(by_flag, settings("mgpurun x", &[]).unwrap(), "{line}");
        // The launcher of which this is a rank has used the variables.
        let nested = [variables, &[("MGPU_RENDEZVOUS", "unix:/x")]].concat();
        assert_eq!(settings("mgpurun x", &nested), settings("mgpurun x", &[]), "{line}");
    }
    let (launch, _) = settings("mgpurun --max-restarts 1 --grace 2 x", LINES[0].1).unwrap();
    assert_eq!((launch.max_restarts, launch.grace), (1, Duration::from_secs(2)));
    let (launch, _) = settings("mgpurun x", &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")]).unwrap();
    assert_eq!(launch.grace, Duration::from_secs(7));
}

#[test]
fn invalid_variables_are_named() {
    for (name, value, why) in [
        ("PET_MAX_RESTARTS", "-1", "invalid digit"),
        ("PET_SHUTDOWN_TIMEOUT", "soon", "a number of seconds"),
        ("PET_REDIRECTS", "4", "0 (none), 1 (standard output)"),
        ("PET_TEE", "yes", "0 (none)"),
        ("PET_MODULE", "yes", "0 or 1"),
        ("PET_NUMA_BINDING", "far", "node, socket"),
        ("PET_LOCAL_RANKS_FILTER", "x", "not a set of ranks"),
        ("PET_SIGNALS_TO_HANDLE", "SIGX", "the name of a signal"),
    ] {
        let text = refusal("mgpurun x", &[(name, value)]);
        assert!(
            text.starts_with(&format!("the variable {name} is `{value}`: ")) && text.contains(why),
            "{text}"
        );
    }
}

#[test]
fn the_style_of_the_program() {
    let style = |line: &str, variables: &[(&str, &str)]| settings(line, variables).unwrap().1.style;
    assert_eq!(style("mgpurun x", &[]), Style::Any { python: false });
    assert_eq!(style("mgpurun --nproc_per_node 2 x", &[]), Style::Any { python: true });
    assert_eq!(style("mgpurun x", &[("PET_NPROC_PER_NODE", "2")]), Style::Any { python: false });
    assert_eq!(style("mgpurun -m x", &[]), Style::Module);
    assert_eq!(style("mgpurun x", &[("PET_MODULE", "1")]), Style::Module);
    assert_eq!(style("mgpurun x", &[("PET_MODULE", "0")]), Style::Any { python: false });
    assert_eq!(style("mgpurun --no-python x", &[]), Style::Direct);
    assert_eq!(style("mgpurun --run-path --no-python x", &[]), Style::RunPath);
    assert!(refusal("mgpurun -m --no-python x", &[]).contains("leave one of them out"));
    assert!(refusal("mgpurun -m x", &[("PET_NO_PYTHON", "1")]).contains("leave one of them out"));
}

#[test]
fn output_is_logged_and_shown_as_under_torchrun() {
    let output = |line: &str, variables: &[(&str, &str)]| settings(line, variables).unwrap().0.output;
    let plain = output("mgpurun --log-dir d x", &[]);
    assert_eq!((plain.log_dir, plain.tee, plain.streams), (Some("d".into()), false, None));
    assert!(output("mgpurun --log-dir d --tee x", &[]).tee);
    assert!(output("mgpurun --log_dir d --nproc-per-node 2 x", &[]).tee);
    let by_variable = output("mgpurun x", &[("PET_LOG_DIR", "d")]);
    assert_eq!((by_variable.log_dir, by_variable.tee), (Some("d".into()), true));
    let streams = output("mgpurun -r 3 -t 0:1,1:2 x", &[]).streams.unwrap();
    assert!(streams.tee.contains(1, Stream::Stderr) && streams.redirects.contains(7, Stream::Stdout));
    assert_eq!(output("mgpurun --tee 0 x", &[]).streams.map(|streams| streams.logs_any()), Some(false));
    assert!(refusal("mgpurun --log-dir d --tee -r 3 x", &[]).contains("--tee 3"));
}

#[test]
fn options_without_a_counterpart_are_refused_and_others_have_no_effect() {
    for (line, variables, text) in [
        (
            "mgpurun --logs_specs a x",
            &[][..],
            "--logs-specs has no counterpart in mgpurun: it names a Python class",
        ),
        ("mgpurun --event-log-handler console x", &[], "--event-log-handler has no counterpart"),
        ("mgpurun --duplicate-stdout-filters a x", &[], "--duplicate-stdout-filters has no counterpart"),
        ("mgpurun --duplicate_stderr_filters a x", &[], "grep its files"),
        ("mgpurun --log-line-prefix-template a x", &[], "--no-prefix"),
        (
            "mgpurun x",
            &[("PET_LOG_LINE_PREFIX_TEMPLATE", "a")],
            "PET_LOG_LINE_PREFIX_TEMPLATE has no counterpart",
        ),
    ] {
        let refusal = refusal(line, variables);
        assert!(refusal.contains(text), "{refusal}");
    }
    let notices = |line: &str, variables: &[(&str, &str)]| settings(line, variables).unwrap().0.notices;
    assert_eq!(notices("mgpurun --event-log-handler null x", &[]), [] as [String; 0]);
    assert_eq!(notices("mgpurun --start-method fork x", &[]), ["--start-method has no effect here"]);
    assert_eq!(
        notices("mgpurun --rdzv-backend c10d --monitor_interval 5 x", &[("PET_START_METHOD", "spawn")]),
        ["--monitor-interval, PET_START_METHOD and --rdzv-backend have no effect here"]
    );
}

#[test]
fn cores_are_bound_by_one_option() {
    let bind = |line: &str| settings(line, &[]).map(|(_, job)| job.bind);
    assert_eq!(bind("mgpurun --numa-binding node x"), Ok(Bind::Numa));
    assert_eq!(bind("mgpurun --numa-binding exclusive --bind core x"), Ok(Bind::Core));
    assert!(
        bind("mgpurun --numa-binding socket --bind numa x").unwrap_err().to_string().contains("leave one")
    );
}
