//! What two threads can see of each other.
