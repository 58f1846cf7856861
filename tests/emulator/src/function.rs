//! Implements [`Bus`] and [`Function`] for the emulator.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::io::Errno;
use spindle_nvme_pcie::function::MapError;
use spindle_nvme_pcie::{Bar, Bus, Function, Iova, Mapping, OpenFunctionError, PciId};
use spindle_reactor::mem::Area;

use crate::Emulator;
use crate::controller::Controller;

/// Shared by an open function and all clones of its registers.
struct Holder {
    /// The controller has a `Weak` of this token and not of the holder, so that the holder is never dropped
    /// under the controller's lock.
    token: Arc<()>,
    emulator: Emulator,
    opening: u64,
}

impl Drop for Holder {
    fn drop(&mut self) {
        let mut controller = self.emulator.lock();
        debug_assert_eq!(Arc::strong_count(&self.token), 1, "one holder");
        if controller.opening == self.opening && !controller.is_gone {
            // VFIO resets a function that is closed.
            controller.reset_function();
            if controller.is_removal_asked {
                controller.vanish();
            }
        }
    }
}

/// The function, valid for one opening.
struct EmulatedFunction {
    bar: Bar,
    holder: Arc<Holder>,
}

struct EmulatedMapping {
    controller: Weak<Mutex<Controller>>,
    id: u64,
    iova: Iova,
}

impl Mapping for EmulatedMapping {
    fn iova(&self) -> Iova {
        self.iova
    }
}

impl Drop for EmulatedMapping {
    fn drop(&mut self) {
        if let Some(controller) = self.controller.upgrade() {
            controller.lock().unwrap_or_else(PoisonError::into_inner).host.unmap(self.id);
        }
    }
}

impl EmulatedFunction {
    /// Calls `act` with the controller. Fails with ENODEV if the drive is gone or was plugged again.
    fn drive<T>(&self, act: impl FnOnce(&mut Controller) -> io::Result<T>) -> io::Result<T> {
        let mut controller = self.holder.emulator.lock();
        if controller.is_gone || controller.opening != self.holder.opening {
            return Err(Errno::NODEV.into());
        }
        act(&mut controller)
    }
}

impl Function for EmulatedFunction {
    fn bar(&self) -> Bar {
        self.bar.clone()
    }

    fn id(&self) -> io::Result<PciId> {
        self.drive(|controller| Ok(controller.spec.id))
    }

    fn map(&self, area: &Area) -> Result<Box<dyn Mapping>, MapError> {
        let mapped = self.drive(|controller| {
            if area.bytes() > controller.host.map_bytes_max {
                return Err(Errno::NOMEM.into());
            }
            Ok(controller.host.map(area))
        });
        let (id, iova) = mapped.map_err(|source| MapError {
            function: self.holder.emulator.address(),
            bytes: area.bytes(),
            source,
        })?;
        let controller = Arc::downgrade(&self.holder.emulator.shared);
        Ok(Box::new(EmulatedMapping { controller, id, iova: Iova(iova) }))
    }

    fn set_bus_master(&self, is_on: bool) -> io::Result<()> {
        self.drive(|controller| {
            controller.host.is_bus_master = is_on;
            Ok(())
        })
    }

    fn reset(&self) -> io::Result<()> {
        self.drive(|controller| {
            if controller.failing_resets != 0 {
                controller.failing_resets -= 1;
                return Err(Errno::IO.into());
            }
            controller.counters.function_resets += 1;
            controller.lose_cache();
            controller.reset_function();
            Ok(())
        })
    }

    fn is_removal_asked(&self) -> bool {
        let controller = self.holder.emulator.lock();
        controller.is_removal_asked && controller.opening == self.holder.opening
    }
}

impl Bus for Emulator {
    fn address(&self) -> String {
        self.lock().spec.address.clone()
    }

    fn open(&self) -> Result<Arc<dyn Function>, OpenFunctionError> {
        let mut controller = self.lock();
        let address = controller.spec.address.clone();
        if controller.is_gone {
            return Err(OpenFunctionError::Missing { address });
        }
        if controller.holder.strong_count() != 0 {
            let source = Errno::BUSY.into();
            return Err(OpenFunctionError::System { address, verb: "open".to_owned(), source });
        }
        controller.opening += 1;
        controller.host.unmap_all();
        controller.reset_function();
        // A function is opened with bus mastering off, which `reset_function` has turned on.
        controller.host.is_bus_master = false;
        let token = Arc::new(());
        controller.holder = Arc::downgrade(&token);
        let opening = controller.opening;
        let holder = Arc::new(Holder { token, emulator: self.clone(), opening });
        let bar = controller.registers.bar(Arc::clone(&holder) as Arc<dyn std::any::Any + Send + Sync>);
        Ok(Arc::new(EmulatedFunction { bar, holder }))
    }
}

impl std::fmt::Debug for Emulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Emulator").field(&self.address()).finish()
    }
}
