use super::*;

/// The settings by flags and variables, and the notices.
fn read(args: &NodeArgs, variables: &[(&str, &str)]) -> Result<(Option<NodeSettings>, Vec<String>), String> {
    let variable =
        |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let surroundings = Surroundings { variable: &variable, file: &|_| None };
    let mut notices = Vec::new();
    let settings = settings(args, &surroundings, &mut notices).map_err(|error| error.to_string())?;
    Ok((settings, notices))
}

fn several(args: &NodeArgs, variables: &[(&str, &str)]) -> NodeSettings {
    let (settings, notices) = read(args, variables).unwrap();
    assert_eq!(notices, [] as [String; 0]);
    settings.expect("several nodes")
}

fn refusal(args: &NodeArgs, variables: &[(&str, &str)]) -> String {
    read(args, variables).unwrap_err()
}

/// Two nodes, of which this is number 1.
fn two_nodes() -> NodeArgs {
    NodeArgs {
        nnodes: Some("2".into()),
        node_rank: Some("1".into()),
        rdzv_endpoint: Some("a".into()),
        ..NodeArgs::default()
    }
}

#[test]
fn by_hand() {
    assert_eq!(
        several(&two_nodes(), &[]),
        NodeSettings {
            nodes: 2..=2,
            node_rank: Some(1),
            endpoint: Some(("a".into(), Ports::One(29400))),
            run_id: None,
            local_addr: None,
            node_timeout: Duration::from_secs(30),
            join_timeout: None,
            net: NetChoice::Auto,
            auth: AuthChoice::Auto,
            secret_file: None,
            engine: None,
            sources: vec![
                ("nodes", "--nnodes".into()),
                ("node rank", "--node-rank".into()),
                ("endpoint", "--rdzv-endpoint".into()),
            ],
        }
    );
}

#[test]
fn a_flag_precedes_mgpu_which_precedes_pet() {
    let variables = [
        ("PET_NNODES", "4"),
        ("PET_NODE_RANK", "3"),
        ("PET_RDZV_ENDPOINT", "p:1"),
        ("PET_RDZV_ID", "of-pet"),
        ("MGPU_NNODES", "3"),
        ("MGPU_NODE_RANK", "2"),
        ("MGPU_RDZV_ENDPOINT", "m:2"),
        ("MGPU_NODE_TIMEOUT", "9"),
        ("MGPU_NET", "ucx"),
        ("MGPU_AUTH", "none"),
        ("MGPU_SECRET_FILE", "/s"),
    ];
    let settings = several(&two_nodes(), &variables);
    assert_eq!((settings.nodes, settings.node_rank), (2..=2, Some(1)));
    assert_eq!(settings.endpoint, Some(("a".into(), Ports::One(29400))));
    let settings = several(&NodeArgs::default(), &variables);
    assert!(settings.describe().contains(&"hosts connected by ucx (from MGPU_NET)".into()));
    assert_eq!((settings.nodes, settings.node_rank), (3..=3, Some(2)));
    assert_eq!(settings.endpoint, Some(("m".into(), Ports::One(2))));
    assert_eq!((settings.run_id.as_deref(), settings.auth), (Some("of-pet"), AuthChoice::None));
    assert_eq!(settings.net, NetChoice::Ucx);
    assert_eq!(settings.node_timeout, Duration::from_secs(9));
    assert_eq!(settings.secret_file, Some("/s".into()));
    assert!(settings.sources.contains(&("node timeout", "MGPU_NODE_TIMEOUT".into())));
    let settings = several(&NodeArgs::default(), &variables[..4]);
    assert_eq!((settings.nodes, settings.node_rank), (4..=4, Some(3)));
    assert_eq!(settings.sources[0], ("nodes", "PET_NNODES".into()));
}

#[test]
fn an_endpoint_precedes_an_address_with_a_port() {
    let endpoint = |args: &NodeArgs, variables: &[(&str, &str)]| several(args, variables).endpoint.unwrap();
    let one = |host: &str, port| (host.to_owned(), Ports::One(port));
    let master = NodeArgs {
        rdzv_endpoint: None,
        master_addr: Some("m".into()),
        master_port: Some("5".into()),
        ..two_nodes()
    };
    assert_eq!(endpoint(&master, &[]), one("m", 5));
    assert_eq!(endpoint(&NodeArgs { rdzv_endpoint: Some("e:6".into()), ..master.clone() }, &[]), one("e", 6));
    // A flag precedes every variable.
    assert_eq!(endpoint(&master, &[("MGPU_RDZV_ENDPOINT", "v:7")]), one("m", 5));
    assert_eq!(endpoint(&NodeArgs { master_port: None, ..master.clone() }, &[]), one("m", 29500));
    let without = NodeArgs { master_addr: None, ..master };
    assert_eq!(endpoint(&without, &[("PET_MASTER_ADDR", "p"), ("PET_MASTER_PORT", "8")]), one("p", 5));
    assert_eq!(endpoint(&without, &[("MASTER_ADDR", "x"), ("MASTER_PORT", "9")]), one("x", 9));
    // The port of an engine's endpoint can be chosen.
    let slurm = [
        ("SLURM_JOB_ID", "1"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_NODELIST", "n[4-5]"),
        ("MASTER_ADDR", "x"),
    ];
    assert_eq!(endpoint(&without, &slurm), one("n4", 5));
    assert_eq!(endpoint(&NodeArgs::default(), &slurm), ("n4".into(), Ports::OfJob));
}

#[test]
fn hosts_and_ports() {
    let given = |text: &str| Given::new(text.to_owned(), "--rdzv-endpoint");
    for (text, host, port) in [
        ("a", "a", None),
        ("a:1", "a", Some(1)),
        ("node-3.cluster_x:65535", "node-3.cluster_x", Some(65535)),
        ("10.0.0.2:29400", "10.0.0.2", Some(29400)),
        ("fd00::2", "fd00::2", None),
        ("::1", "::1", None),
        ("[fd00::2]", "fd00::2", None),
        ("[fd00::2]:29400", "fd00::2", Some(29400)),
        ("[fe80::1%eth0]:29400", "fe80::1%eth0", Some(29400)),
        ("::ffff:10.0.0.2", "::ffff:10.0.0.2", None),
        (" a:1 ", "a", Some(1)),
    ] {
        assert_eq!(parse_endpoint(&given(text)), Ok((host.to_owned(), port)), "{text}");
    }
    for text in [
        "",
        ":1",
        "a:",
        "a:0",
        "a:65536",
        "a:x",
        "a:b:c",
        "[a]:1",
        "[fd00::2",
        "[fd00::2]1",
        "fd00::2]:1",
        "tcp://a:1",
        "a b",
        "a/b",
    ] {
        let error = parse_endpoint(&given(text)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("--rdzv-endpoint is `{text}`: it")), "{error}");
    }
    assert!(parse_host(&given("a:1")).is_err());
}

#[test]
fn values_that_cannot_be() {
    for (change, text) in [
        (
            NodeArgs { nnodes: Some("0".into()), ..two_nodes() },
            "--nnodes is `0`: at least one node is needed",
        ),
        (NodeArgs { nnodes: Some("0:2".into()), ..two_nodes() }, "at least one node is needed"),
        (
            NodeArgs { nnodes: Some("4:2".into()), ..two_nodes() },
            "--nnodes is `4:2`: it should be MIN:MAX, and MIN is",
        ),
        (
            NodeArgs { nnodes: Some("two".into()), ..two_nodes() },
            "it should be a number of nodes, such as 2, or MIN:MAX",
        ),
        (NodeArgs { nnodes: Some("99999".into()), ..two_nodes() }, "at most 65536 nodes are possible"),
        (
            NodeArgs { node_rank: Some("2".into()), ..two_nodes() },
            "this is node 2 (--node-rank), and the job has 2 nodes (--nnodes): nodes count from 0 to 1",
        ),
        (
            NodeArgs { node_rank: Some("-1".into()), ..two_nodes() },
            "--node-rank is `-1`: it should be the number of this",
        ),
        (
            NodeArgs { nnodes: None, ..two_nodes() },
            "this is node 1 (--node-rank), and the number of nodes is unknown: add --nnodes",
        ),
        (
            NodeArgs { nnodes: Some("1".into()), ..two_nodes() },
            "and the job has 1 node (--nnodes): nodes count from 0 to 0",
        ),
        (
            NodeArgs { rdzv_endpoint: None, ..two_nodes() },
            "2 nodes, and it is unknown where node 0 is: add --rdzv-endpoint HOST[:PORT], the same on all nodes",
        ),
        (
            NodeArgs { rdzv_backend: Some("etcd".into()), ..two_nodes() },
            "--rdzv-backend is `etcd`: mgpurun has a rendezvous of its own and accepts static and c10d only",
        ),
        (
            NodeArgs { rdzv_conf: Some("timeout".into()), ..two_nodes() },
            "--rdzv-conf is `timeout`: it should be KEY=VALUE",
        ),
        (
            NodeArgs { rdzv_conf: Some("timeout=soon".into()), ..two_nodes() },
            "timeout should be a number of seconds",
        ),
        (
            NodeArgs { master_port: Some("0".into()), ..two_nodes() },
            "--master-port is `0`: it should be a port from 1",
        ),
        (
            NodeArgs { node_timeout: Some("2".into()), ..two_nodes() },
            "--node-timeout is `2`: it should be a number of seconds, at least 3",
        ),
        (NodeArgs { net: Some("ib".into()), ..two_nodes() }, "--net is `ib`: it should be auto, tcp or ucx"),
        (
            NodeArgs { auth: Some("kerberos".into()), ..two_nodes() },
            "--auth is `kerberos`: it should be auto, secret, munge or none",
        ),
        (
            NodeArgs { auth: Some("secret".into()), ..two_nodes() },
            "authentication by a secret needs one: add --secret-file FILE",
        ),
        (
            NodeArgs { auth: Some("none".into()), secret_file: Some("/s".into()), ..two_nodes() },
            "--auth none uses no secret, and --secret-file has one",
        ),
        (NodeArgs { standalone: true, ..two_nodes() }, "--standalone means one node, and --nnodes is 2"),
    ] {
        let error = refusal(&change, &[]);
        assert!(error.contains(text), "{error}");
    }
    let error = refusal(&NodeArgs::default(), &[("PET_NNODES", "x")]);
    assert!(error.starts_with("PET_NNODES is `x`: "), "{error}");
    let secret = NodeArgs { auth: Some("secret".into()), ..two_nodes() };
    assert_eq!(several(&secret, &[("MGPU_SECRET", "abc")]).auth, AuthChoice::Secret);
}

#[test]
fn standalone_is_one_node() {
    let variables = [("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_RDZV_ENDPOINT", "a:1")];
    let standalone = NodeArgs { standalone: true, ..NodeArgs::default() };
    assert_eq!(read(&standalone, &variables), Ok((None, Vec::new())));
    assert_eq!(read(&standalone, &[("SLURM_STEP_NUM_NODES", "x")]), Ok((None, Vec::new())));
    // Kubeflow sets the variable without a value; zero is torchrun's way to say no.
    let with = |value: &'static str| [&variables[..], &[("PET_STANDALONE", value)]].concat();
    assert_eq!(read(&NodeArgs::default(), &with("")), Ok((None, Vec::new())));
    assert_eq!(read(&NodeArgs::default(), &with("1")), Ok((None, Vec::new())));
    assert!(read(&NodeArgs::default(), &with("0")).unwrap().0.is_some());
    // A flag precedes it.
    assert!(read(&two_nodes(), &with("1")).unwrap().0.is_some());
}

#[test]
fn nothing_changes_on_one_node() {
    for (args, notices) in [
        (NodeArgs::default(), 0),
        (
            NodeArgs {
                nnodes: Some("1".into()),
                rdzv_endpoint: Some("localhost:0".into()),
                ..NodeArgs::default()
            },
            0,
        ),
        (NodeArgs { nnodes: Some("1:1".into()), node_rank: Some("0".into()), ..NodeArgs::default() }, 0),
        (NodeArgs { rdzv_endpoint: Some("a:1".into()), ..NodeArgs::default() }, 1),
        (NodeArgs { node_rank: Some("0".into()), ..NodeArgs::default() }, 1),
    ] {
        let (settings, said) = read(&args, &[]).unwrap();
        assert_eq!(settings, None);
        assert_eq!(said.len(), notices, "{said:?}");
    }
}

#[test]
fn another_number_of_nodes_than_the_engine_s_is_reported() {
    let slurm = [
        ("SLURM_JOB_ID", "1"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_NODEID", "3"),
        ("SLURM_STEP_NODELIST", "n[4-7]"),
    ];
    let (settings, notices) = read(&two_nodes(), &slurm).unwrap();
    assert_eq!(settings.unwrap().nodes, 2..=2);
    assert_eq!(
        notices,
        [
            "Slurm has started mgpurun on 4 nodes (SLURM_STEP_NUM_NODES); the job has 2 nodes, as --nnodes says"
        ]
    );
    let one = NodeArgs { nnodes: Some("1".into()), ..NodeArgs::default() };
    let (settings, notices) = read(&one, &slurm).unwrap();
    assert_eq!((settings, notices.len()), (None, 1));
    let elastic = NodeArgs { nnodes: Some("2:8".into()), ..NodeArgs::default() };
    assert_eq!(several(&elastic, &slurm).nodes, 2..=8);
    let error = refusal(&NodeArgs { nnodes: Some("2".into()), ..NodeArgs::default() }, &slurm);
    assert_eq!(
        error,
        "this is node 3 (SLURM_NODEID), and the job has 2 nodes (--nnodes): nodes count from 0 to 1"
    );
}

#[test]
fn settings_in_words_name_their_sources_and_no_secret() {
    let variables =
        [("MGPU_SECRET", "hunter2"), ("MGPU_SECRET_FILE", "/run/secret"), ("PET_RDZV_ID", "job7")];
    let args = NodeArgs {
        rdzv_endpoint: Some("[fd00::2]:5".into()),
        local_addr: Some("fd00::3".into()),
        ..two_nodes()
    };
    let lines = several(&args, &variables).describe();
    assert_eq!(
        lines,
        [
            "2 nodes (from --nnodes)",
            "this is node 1 (from --node-rank)",
            "node 0 is at [fd00::2]:5 (from --rdzv-endpoint)",
            "run id job7 (from PET_RDZV_ID)",
            "address of this node fd00::3 (from --local-addr)",
            "node timeout 30 s",
            "authentication by a secret if there is one, otherwise by munge",
            "secret in the file /run/secret (from MGPU_SECRET_FILE)",
        ]
    );
}

#[test]
fn the_ranks_of_a_node_by_a_variable() {
    let find = |variables: &[(&str, &str)]| {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        ranks_variable(&Surroundings { variable: &variable, file: &|_| None })
    };
    assert_eq!(find(&[("PET_NPROC_PER_NODE", "4")]), Some(("PET_NPROC_PER_NODE", "4".into())));
    assert_eq!(find(&[("PET_N_PROC_PER_NODE", "4")]), Some(("PET_N_PROC_PER_NODE", "4".into())));
    assert_eq!(find(&[("PET_NPROC_PER_NODE", "4"), ("MGPU_RENDEZVOUS", "unix:/x")]), None);
    assert_eq!(find(&[]), None);
}
