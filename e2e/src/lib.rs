//! Scenarios with real guests.
