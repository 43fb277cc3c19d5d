//! Services that start a container on each node: AWS Batch, SageMaker and Kubernetes. Kubeflow's operators set torchrun's
//! `PET_*`, which need no reader here.
//!
//! Not seen running: these readers follow the services' manuals and sources.

use super::super::settings::{Ports, SettingsError, Surroundings};
use super::{Engine, Given, Reading, Told};

/// AWS Batch: the main node, which need not be the first, becomes node 0. Its address is absent on itself.
pub(super) fn aws_batch(variables: &Surroundings<'_>) -> Reading {
    let Some(nodes) = variables.number("AWS_BATCH_JOB_NUM_NODES")? else { return Ok(None) };
    let index = variables.number("AWS_BATCH_JOB_NODE_INDEX")?;
    let main = variables.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")?.map_or(0, |main| main.value);
    let mut told = Told::by(Engine::AwsBatch);
    told.nodes = Some(nodes);
    told.node_rank = index.map(|index| {
        index.map(|index| match index {
            main_itself if main_itself == main => 0,
            0 => main,
            other => other,
        })
    });
    let is_main = told.node_rank.as_ref().is_some_and(|rank| rank.value == 0);
    let address = variables.given("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS");
    let own = is_main.then(|| Given::new("localhost".to_owned(), "AWS_BATCH_JOB_NODE_INDEX"));
    told.endpoint = address.or(own).map(|host| host.map(|host| (host, Ports::OfJob)));
    // A node's job has the number of the node behind `#`.
    told.run_id = variables
        .given("AWS_BATCH_JOB_ID")
        .map(|id| id.map(|id| id.split_once('#').map_or(id.clone(), |(job, _)| job.to_owned())));
    Ok(Some(told))
}

/// SageMaker: `SM_HOSTS` is a JSON array of names, the same on all hosts.
pub(super) fn sagemaker(variables: &Surroundings<'_>) -> Reading {
    let (Some(hosts), Some(own)) = (variables.text("SM_HOSTS"), variables.text("SM_CURRENT_HOST")) else {
        return Ok(None);
    };
    let names: Vec<String> = serde_json::from_str(&hosts).map_err(|_| {
        SettingsError::new(format!("the variable SM_HOSTS is `{hosts}`, not a JSON array of names"))
    })?;
    let mut told = Told::by(Engine::SageMaker);
    told.nodes = Some(Given::new(names.len() as u32, "SM_HOSTS"));
    match names.iter().position(|name| *name == own) {
        Some(index) => told.node_rank = Some(Given::new(index as u32, "SM_CURRENT_HOST")),
        None => told.refusal = Some(format!("SM_CURRENT_HOST is `{own}`, which is not in SM_HOSTS, {hosts}")),
    }
    told.endpoint = names.into_iter().next().map(|host| Given::new((host, Ports::OfJob), "SM_HOSTS"));
    told.run_id = variables.given("TRAINING_JOB_NAME");
    Ok(Some(told))
}

/// Kubernetes numbers the pods of an Indexed Job. How many there are, and their service, it does not tell them.
pub(super) fn kubernetes(variables: &Surroundings<'_>) -> Reading {
    let Some(index) = variables.number("JOB_COMPLETION_INDEX")? else { return Ok(None) };
    let mut told = Told::by(Engine::Kubernetes);
    told.node_rank = Some(index);
    Ok(Some(told))
}
