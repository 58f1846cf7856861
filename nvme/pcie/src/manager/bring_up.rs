//! Enables and identifies a controller in any state: [`ManagerTask::bring_up`] (Base 2.0 section 3.5.1).

use std::sync::Arc;
use std::time::Duration;

use nvme_spec::feature::{AsyncEventConfig, FeatureId, NumberOfQueues};
use nvme_spec::identify::{
    Cns, Csi, EntrySize, IdentifyController, IdentifyControllerNvm, IdentifyNamespace, NamespaceList, Oacs,
    Oaes, Sgls,
};
use nvme_spec::register::{self, Aqa, Cap, Cc, Csts};
use nvme_spec::sqe::Sqe;
use nvme_spec::zerocopy::IntoBytes;

use super::{ManagerError, ManagerTask, TIMEOUT_SLACK, check_ready, check_status};
use crate::admin::Admin;
use crate::bar::Bar;
use crate::dma::{DmaMemory, PAGE_BYTES};
use crate::function::{Function, OpenFunctionError};
use crate::queue::{Completion, Shadow};
use crate::quirks::Quirks;
use crate::rules::{Namespace, Rules};
use crate::shared::DriveFacts;

/// Maximum number of active namespaces identified, in the order of NSIDs. Further ones are ignored.
const NAMESPACES_MAX: usize = 128;

pub(super) struct Controller {
    pub(super) admin: Admin,
    pub(super) bar: Bar,
    pub(super) cap: Cap,
    pub(super) id: Box<IdentifyController>,
    pub(super) shadow: Option<Shadow>,
    pub(super) queue_pairs: u32,
    pub(super) quirks: Quirks,
}

impl Controller {
    /// Returns true if I/O commands may use SGLs.
    pub(super) fn has_sgls(&self) -> bool {
        Sgls::from(self.id.sgls).support() != 0 && !self.quirks.has_bad_sgls
    }
}

impl ManagerTask {
    /// Enables and identifies the controller and its namespaces. Sets the number of queues, shadow doorbells
    /// and events.
    pub(super) async fn bring_up(
        &mut self,
        function: &Arc<dyn Function>,
    ) -> Result<Controller, ManagerError> {
        let bar = function.bar();
        let cap = Cap::from_bits(bar.read64(register::CAP.into()));
        if cap.into_bits() == u64::MAX {
            return Err(ManagerError::Gone);
        }
        check_cap(cap)?;
        check_doorbells(&bar, cap)?;
        let admin = Admin::new(function.as_ref(), bar.clone(), cap.dstrd())?;
        self.controller_memory.push(Arc::clone(admin.memory()));
        self.enable(&bar, function, cap, &admin).await?;
        let quirks = self.quirks(function);
        let mut controller =
            Controller { admin, bar, cap, id: Box::default(), shadow: None, queue_pairs: 0, quirks };
        let sqe = Sqe::identify(0, Cns::CONTROLLER, 0, 0);
        self.command_with_data(function, &controller, sqe, "Identify Controller").await?;
        controller.admin.data(controller.id.as_mut_bytes());
        check_entries(&controller.id)?;
        let mut nvm: Box<IdentifyControllerNvm> = Box::default();
        let sqe = Sqe::identify_csi(0, Cns::CSI_CONTROLLER, 0, Csi::NVM);
        // Controllers of Base 1.4 and older refuse this CNS and have no such limits.
        match self.command_with_data(function, &controller, sqe, "Identify Controller (NVM)").await {
            Ok(_) => controller.admin.data(nvm.as_mut_bytes()),
            Err(ManagerError::Refused { .. }) => {}
            Err(other) => return Err(other),
        }
        self.number_of_queues(function, &mut controller).await?;
        let found = self.namespaces(function, &controller, &nvm).await?;
        self.store_identity(&controller, found)?;
        self.shadow_doorbells(function, &mut controller).await?;
        self.events(function, &controller).await?;
        Ok(controller)
    }

    async fn enable(
        &self,
        bar: &Bar,
        function: &Arc<dyn Function>,
        cap: Cap,
        admin: &Admin,
    ) -> Result<(), ManagerError> {
        let limit = Duration::from_millis(u64::from(cap.timeout_ms())) + TIMEOUT_SLACK;
        let csts = || Csts::from_bits(bar.read32(register::CSTS.into()));
        if Cc::from_bits(bar.read32(register::CC.into())).en() || csts().rdy() {
            bar.write32(register::CC.into(), 0);
            self.within(self.quirks(function).ready_delay, || None::<()>).await;
        }
        let off = self.within(limit, || (!csts().rdy()).then_some(())).await;
        if off.is_none() {
            check_status(bar, function)?;
            return Err(ManagerError::Slow { what: "CSTS.RDY to become 0", limit });
        }
        // Only once the controller is disabled: a controller that was left enabled may write to addresses
        // that an earlier user mapped.
        function.set_bus_master(true).map_err(|source| OpenFunctionError::System {
            address: self.shared.address.clone(),
            verb: "enable bus mastering".to_owned(),
            source,
        })?;
        let (sq, cq, entries) = admin.queue_addresses();
        let aqa = Aqa::new().with_asqs_z(entries - 1).with_acqs_z(entries - 1);
        bar.write32(register::AQA.into(), aqa.into_bits());
        bar.write64(register::ASQ.into(), sq.0);
        bar.write64(register::ACQ.into(), cq.0);
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        bar.write32(register::CC.into(), cc.into_bits());
        // All ones also has RDY set; `check_status` detects that.
        let on = self.within(limit, || (csts().rdy() || csts().cfs()).then_some(())).await;
        check_status(bar, function)?;
        if on.is_none() {
            return Err(ManagerError::Slow { what: "CSTS.RDY to become 1", limit });
        }
        Ok(())
    }

    /// Executes an admin command with the admin queue's data page as its buffer.
    pub(super) async fn command_with_data(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        sqe: Sqe,
        command: &'static str,
    ) -> Result<Completion, ManagerError> {
        let admin = &controller.admin;
        admin.clear_data();
        let sqe = sqe.with_prp(admin.data_iova().0, 0);
        self.command(function, controller, sqe, command).await
    }

    /// Executes an admin command without changing its data pointer. Handles Aborts, reset requests and events
    /// while waiting.
    pub(super) async fn command(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        sqe: Sqe,
        command: &'static str,
    ) -> Result<Completion, ManagerError> {
        let limit = self.shared.settings.admin_timeout;
        let slow = ManagerError::Slow { what: command, limit };
        self.is_busy.set(true);
        let Some(ticket) = controller.admin.start(sqe) else { return Err(slow) };
        let ended = self.within(limit, || {
            controller.admin.poll();
            match controller.admin.take(ticket) {
                Some(completion) => Some(Ok(completion)),
                None => check_ready(&controller.bar, function)
                    .and_then(|()| self.step_background(controller))
                    .err()
                    .map(Err),
            }
        });
        match ended.await {
            None => Err(slow),
            Some(Err(failure)) => Err(failure),
            Some(Ok(completion)) if completion.status.is_success() => Ok(completion),
            Some(Ok(completion)) => Err(ManagerError::Refused { command, status: completion.status }),
        }
    }

    async fn number_of_queues(
        &self,
        function: &Arc<dyn Function>,
        controller: &mut Controller,
    ) -> Result<(), ManagerError> {
        let wanted = self.shared.settings.queue_pairs.max(1);
        let value = NumberOfQueues::both(wanted).into_bits();
        let sqe = Sqe::set_features(0, FeatureId::NUMBER_OF_QUEUES, 0, value).with_prp(0, 0);
        let answer = self.command(function, controller, sqe, "Set Features (Number of Queues)").await?;
        let [a, b, c, d, ..] = answer.result.to_le_bytes();
        let given = NumberOfQueues::from_bits(u32::from_le_bytes([a, b, c, d])).pairs();
        let fitting = queue_pairs_in(controller.bar.bytes(), controller.cap.dstrd());
        controller.queue_pairs = given.min(wanted).min(fitting);
        Ok(())
    }

    /// Identifies the active namespaces. Logs and skips those that cannot be served. Fails if the controller
    /// refuses to identify a namespace in use.
    async fn namespaces(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        nvm: &IdentifyControllerNvm,
    ) -> Result<Vec<(Namespace, Rules)>, ManagerError> {
        let mut list: Box<NamespaceList> = Box::default();
        let sqe = Sqe::identify(0, Cns::ACTIVE_NAMESPACE_LIST, 0, 0);
        self.command_with_data(function, controller, sqe, "Identify (active namespaces)").await?;
        controller.admin.data(list.as_mut_bytes());
        let mut found = Vec::new();
        for nsid in list.iter().take(NAMESPACES_MAX) {
            let mut id: Box<IdentifyNamespace> = Box::default();
            let sqe = Sqe::identify(0, Cns::NAMESPACE, nsid, 0);
            match self.command_with_data(function, controller, sqe, "Identify Namespace").await {
                Ok(_) => controller.admin.data(id.as_mut_bytes()),
                // A namespace of another command set, or one that was just detached.
                Err(refused @ ManagerError::Refused { .. }) if !self.is_used(nsid) => {
                    tracing::warn!(drive = %self.shared.address, nsid, "cannot be served: {refused}");
                    continue;
                }
                Err(other) => return Err(other),
            }
            match Namespace::new(nsid, &id, &controller.id) {
                Ok(namespace) => {
                    let mut rules = Rules::new(&namespace, &controller.id, nvm, controller.cap.mpsmin());
                    if rules.boundary_blocks == 0 {
                        rules.boundary_blocks =
                            controller.quirks.stripe_blocks(&controller.id, namespace.shift);
                    }
                    found.push((namespace, rules));
                }
                Err(unfit) => {
                    tracing::warn!(drive = %self.shared.address, "cannot be served: {unfit}");
                }
            }
        }
        Ok(found)
    }

    pub(super) fn is_used(&self, nsid: u32) -> bool {
        self.shared
            .state()
            .core_queues
            .iter()
            .any(|core_queue| core_queue.nsid == nsid && !core_queue.is_closed())
    }

    /// Stores the identity of the drive. Once the drive was in service, fails if the serial or model number,
    /// or a namespace in use, differs from before.
    fn store_identity(
        &self,
        controller: &Controller,
        found: Vec<(Namespace, Rules)>,
    ) -> Result<(), ManagerError> {
        let id = &controller.id;
        let facts = DriveFacts {
            serial: id.serial().to_owned(),
            model: id.model().to_owned(),
            firmware: id.firmware().to_owned(),
            queue_pairs: controller.queue_pairs,
            entries_max: controller.cap.queue_entries_max(),
            has_sgls: controller.has_sgls(),
            has_shadow_doorbells: Oacs::from(id.oacs).doorbell_buffer(),
        };
        let mut state = self.shared.state();
        let another = |field, value: &str, was: &str| {
            Err(ManagerError::Another { field, value: value.to_owned(), was: was.to_owned() })
        };
        if let Some(before) = state.facts.as_ref().filter(|_| self.has_served) {
            if before.serial != facts.serial {
                return another("serial number", &facts.serial, &before.serial);
            }
            if before.model != facts.model {
                return another("model number", &facts.model, &before.model);
            }
            for (namespace, _) in &state.namespaces {
                let nsid = namespace.nsid;
                let is_used = state
                    .core_queues
                    .iter()
                    .any(|core_queue| core_queue.nsid == nsid && !core_queue.is_closed());
                if is_used && !found.iter().any(|(now, _)| now.is_same(namespace)) {
                    return Err(ManagerError::another(namespace));
                }
            }
        }
        let before = std::mem::take(&mut state.namespaces);
        for (now, rules) in found {
            match before.iter().find(|(was, _)| was.is_same(&now)) {
                Some((was, _)) => {
                    was.set_blocks(now.blocks());
                    state.namespaces.push((Arc::clone(was), rules));
                }
                None => state.namespaces.push((Arc::new(now), rules)),
            }
        }
        state.facts = Some(facts);
        Ok(())
    }

    /// Sets up shadow doorbells (Doorbell Buffer Config), where the controller supports them.
    async fn shadow_doorbells(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &mut Controller,
    ) -> Result<(), ManagerError> {
        if !Oacs::from(controller.id.oacs).doorbell_buffer() {
            return Ok(());
        }
        let memory = DmaMemory::new(function.as_ref(), 2 * PAGE_BYTES as usize)?;
        self.controller_memory.push(Arc::clone(&memory));
        let (shadow, event) = (memory.iova(), memory.iova().plus(PAGE_BYTES.into()));
        let sqe = Sqe::doorbell_buffer_config(0, shadow.0, event.0);
        match self.command(function, controller, sqe, "Doorbell Buffer Config").await {
            Ok(_) => controller.shadow = Some(Shadow { memory }),
            // Without shadow doorbells, the doorbell registers are used.
            Err(ManagerError::Refused { .. }) => {}
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Enables events about health and, where the controller offers them, about namespaces. A controller that
    /// refuses is used without these events.
    async fn events(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), ManagerError> {
        let offered = Oaes::from(controller.id.oaes);
        let wanted = AsyncEventConfig::new()
            .with_critical_warnings(0x1f)
            .with_namespace_attribute(offered.namespace_attribute());
        let sqe = Sqe::set_features(0, FeatureId::ASYNC_EVENT_CONFIG, 0, wanted.into_bits()).with_prp(0, 0);
        match self.command(function, controller, sqe, "Set Features (Asynchronous Events)").await {
            Ok(_) | Err(ManagerError::Refused { .. }) => Ok(()),
            Err(other) => Err(other),
        }
    }
}

fn check_cap(cap: Cap) -> Result<(), ManagerError> {
    let unfit = |field, value: String, allowed| Err(ManagerError::Unfit { field, value, allowed });
    if !cap.css_nvm() {
        return unfit(
            "CAP.CSS",
            format!("{:#x}", cap.into_bits() >> 37 & 0xff),
            "must have the NVM command set",
        );
    }
    if cap.mpsmin() != 0 {
        return unfit("CAP.MPSMIN", cap.mpsmin().to_string(), "must be 0 (pages of 4096 bytes)");
    }
    if cap.mqes_z() == 0 {
        return unfit("CAP.MQES", "0".to_owned(), "must be 1 (2 entries) to 65535");
    }
    Ok(())
}

/// Fails if BAR 0 does not contain the doorbells of the admin queue and one I/O queue pair.
fn check_doorbells(bar: &Bar, cap: Cap) -> Result<(), ManagerError> {
    if queue_pairs_in(bar.bytes(), cap.dstrd()) > 0 {
        return Ok(());
    }
    let value = format!("{}, and BAR 0 has {} bytes", cap.dstrd(), bar.bytes());
    let allowed = "the doorbells of the admin queue and of one I/O queue pair must lie in BAR 0";
    Err(ManagerError::Unfit { field: "CAP.DSTRD", value, allowed })
}

/// Returns the number of I/O queue pairs whose doorbells are within `bytes` of registers.
fn queue_pairs_in(bytes: usize, dstrd: u8) -> u32 {
    let bytes = (bytes as u64).saturating_sub(u64::from(register::DOORBELLS));
    // The last doorbell needs its own 4 bytes only, not a whole stride.
    let doorbells = bytes.saturating_sub(4) / (4 << (dstrd & 0xf)) + u64::from(bytes >= 4);
    u32::try_from(doorbells / 2).unwrap_or(u32::MAX).saturating_sub(1)
}

fn check_entries(id: &IdentifyController) -> Result<(), ManagerError> {
    let fits = |size: u8, needed: u8| {
        let size = EntrySize::from_bits(size);
        (size.required()..=size.largest()).contains(&needed)
    };
    if fits(id.sqes, 6) && fits(id.cqes, 4) {
        return Ok(());
    }
    let value = format!("{:#x} and {:#x}", id.sqes, id.cqes);
    Err(ManagerError::Unfit {
        field: "SQES and CQES",
        value,
        allowed: "must have entries of 64 and of 16 bytes",
    })
}

#[cfg(test)]
mod tests {
    use nvme_spec::pcie::cq_head_doorbell;

    use super::*;

    #[test]
    fn a_queue_pair_fits_when_its_last_doorbell_lies_in_the_registers() {
        for dstrd in [0, 1, 4, 15] {
            for pairs in [1_u16, 2, 63, 1000] {
                let end = usize::try_from(cq_head_doorbell(pairs, dstrd) + 4).expect("small");
                assert_eq!(queue_pairs_in(end, dstrd), u32::from(pairs), "{dstrd}");
                assert_eq!(queue_pairs_in(end - 1, dstrd), u32::from(pairs) - 1, "{dstrd}");
            }
            assert_eq!((queue_pairs_in(0, dstrd), queue_pairs_in(0x1000, dstrd)), (0, 0));
        }
    }
}
