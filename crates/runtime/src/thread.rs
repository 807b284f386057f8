//! A thread with a tokio runtime of its own, so that neither the data plane nor the control API waits for what is done there.

use std::future::Future;
use std::io;
use std::sync::Mutex;
use std::thread::JoinHandle;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// The thread. Dropping it ends it, and waits for that.
pub struct RuntimeThread {
    runtime: Handle,
    thread: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

impl RuntimeThread {
    /// Starts what `serve` makes of the word to stop, which also comes by being dropped. Beside it at most so many threads do what blocks.
    ///
    /// # Errors
    /// When the system has no threads or descriptors left.
    pub fn start<F: Future<Output = ()>>(
        name: &str,
        max_blocking_threads: usize,
        serve: impl FnOnce(oneshot::Receiver<()>) -> F + Send + 'static,
    ) -> io::Result<RuntimeThread> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(max_blocking_threads)
            .thread_name(format!("{name}-waits"))
            .build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                runtime.block_on(serve(stopped));
                // Names that are still looked up would be waited for otherwise.
                runtime.shutdown_background();
            })?;
        Ok(RuntimeThread {
            runtime: handle,
            thread: Mutex::new(Some((stop, thread))),
        })
    }

    /// Where to spawn what the thread is to do.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Asks it to stop, and waits until it has.
    pub fn stop(&self) {
        let thread = sys::lock(&self.thread).take();
        if let Some((stop, thread)) = thread {
            // It may have ended by itself; if it panicked, that has been printed.
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

impl Drop for RuntimeThread {
    fn drop(&mut self) {
        self.stop();
    }
}
