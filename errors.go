package mongoq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Errors of a call that asks for work.
var (
	// ErrEmpty is returned by TryReserve and TryPop when nothing in the queue may be taken now.
	ErrEmpty = errors.New("mongoq: queue is empty")

	// ErrQueuePaused is returned by TryReserve and TryPop while the queue is paused.
	ErrQueuePaused = errors.New("mongoq: queue is paused")

	// ErrClosed is returned by every call on a closed Store, and to those that waited when it closed. What was reserved
	// before can still be settled.
	ErrClosed = errors.New("mongoq: store is closed")

	// ErrInTransaction is returned by Open, Reserve, Pop and their kin, Worker.Run and Pipeline.Run when the context
	// carries a MongoDB session: a claim inside an open transaction would block every other claimer of the queue.
	ErrInTransaction = errors.New("mongoq: not possible in a transaction")
)

// Errors of a call that names or holds an envelope.
var (
	// ErrLeaseLost is returned by every verb of a Reservation whose token no longer matches the stored envelope:
	// the lease lapsed and somebody else took it, or the reservation was settled before. Nothing was changed.
	ErrLeaseLost = errors.New("mongoq: lease lost")

	// ErrNotFound is returned when there is no envelope with that id where it was looked for.
	ErrNotFound = errors.New("mongoq: envelope not found")

	// ErrReserved is returned by Remove while the envelope is held under a lease.
	ErrReserved = errors.New("mongoq: envelope is reserved")

	// ErrOutcomeUnknown is returned when the answer to a write was lost and what is stored afterwards does not tell
	// whether the write happened. It wraps the cause. The write may also still happen.
	ErrOutcomeUnknown = errors.New("mongoq: outcome unknown")
)

// Errors of bad input, and of a server that is not as it must be. Nothing was stored.
var (
	// ErrInvalidOption is wrapped by every error about a name, an option or a configuration that breaks a rule; the
	// error's text states the rule and what was given.
	ErrInvalidOption = errors.New("mongoq: invalid option")

	// ErrPayloadTooLarge is returned when an envelope would be larger than [MaxEnvelopeSize] in all.
	ErrPayloadTooLarge = errors.New("mongoq: envelope too large")

	// ErrDuplicate is returned by a push with an ID under which another envelope is stored already.
	ErrDuplicate = errors.New("mongoq: another envelope has this id")

	// ErrUnauthorized is returned by Open when the client's user lacks a right that the store cannot do without; the error's
	// text names the action and the collection.
	ErrUnauthorized = errors.New("mongoq: not authorized")

	// ErrUnsupportedServer is returned by Open when the server is older than MongoDB 5.0.
	ErrUnsupportedServer = errors.New("mongoq: unsupported server")
)

// BatchError is returned by PushMany and CommitMany when some of the envelopes failed; those not listed succeeded.
// errors.Is and errors.As look into every one of them.
type BatchError struct {
	Total  int         // how many the call was about
	Failed []ItemError // those that failed, by ascending index
}

// ItemError is the failure of one envelope of a batch.
type ItemError struct {
	Index int // its place in the slice given to the call
	Err   error
}

func (e *BatchError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "mongoq: %d of %d failed", len(e.Failed), e.Total)
	for i, f := range e.Failed {
		if i == 3 {
			b.WriteString("; ...")
			break
		}
		fmt.Fprintf(&b, "; [%d] %v", f.Index, f.Err)
	}
	return b.String()
}

// Unwrap gives the failures to errors.Is and errors.As.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Failed))
	for i, f := range e.Failed {
		errs[i] = f.Err
	}
	return errs
}

// batchError makes the error of a batch from one error per member, nil when all are nil.
func batchError(errs []error) error {
	var failed []ItemError
	for i, err := range errs {
		if err != nil {
			failed = append(failed, ItemError{Index: i, Err: err})
		}
	}
	if failed == nil {
		return nil
	}
	return &BatchError{Total: len(errs), Failed: failed}
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalidOption, fmt.Sprintf(format, args...))
}

// unknown wraps the causes of an outcome that could not be told.
func unknown(causes ...error) error {
	cause := errors.Join(causes...)
	if cause == nil { // of a second call, which has met nothing itself
		return fmt.Errorf("%w: what is stored does not tell", ErrOutcomeUnknown)
	}
	return fmt.Errorf("%w: %w", ErrOutcomeUnknown, cause)
}

// Codes of the server's src/mongo/base/error_codes.yml.
const (
	codeMaxTimeMSExpired       = 50
	codeUnauthorized           = 13
	codeIndexNotFound          = 27
	codeNamespaceNotFound      = 26
	codeNamespaceExists        = 48
	codeWriteConcernFailed     = 64
	codeIndexOptionsConflict   = 85
	codeIndexKeySpecsConflict  = 86
	codeShutdownInProgress     = 91
	codeConflictingOperation   = 117
	codePrimarySteppedDown     = 189
	codeExceededTimeLimit      = 262
	codeTemporarilyUnavailable = 365
	codeTooLargeForCache       = 388
	codeObjectTooLarge         = 10334
	codeNotWritablePrimary     = 10107
	codeDuplicateKey           = 11000
	codeInterruptedAtShutdown  = 11600
	codeInterrupted            = 11601
	codeInterruptedStateChange = 11602
	codeBuildingIndex          = 12587
	codeNotPrimaryNoSecondary  = 13435
	codeNotPrimaryOrSecondary  = 13436
	codeResultTooLarge         = 17419
	codeUpdateTooLarge         = 17420
	codeRolledBack             = -31800 // the storage engine's own: before 6.2 in place of codeTooLargeForCache
)

// Codes a server answers with when it may have stopped in the middle of a command.
var interruptedCodes = []int{
	codeMaxTimeMSExpired, codeWriteConcernFailed, codeShutdownInProgress, codePrimarySteppedDown,
	codeExceededTimeLimit, codeInterruptedAtShutdown, codeInterrupted, codeInterruptedStateChange,
}

// Codes of a server that refused a write because it is not the primary: sending it again finds the new one.
var notPrimaryCodes = []int{codeNotWritablePrimary, codeNotPrimaryNoSecondary, codeNotPrimaryOrSecondary}

// Codes of a server whose cache is full of others' writes: it has undone this one, which fits when they are through.
var fullCodes = []int{codeTemporarilyUnavailable, codeTooLargeForCache, codeRolledBack}

func hasCode(err error, codes ...int) bool {
	var se mongo.ServerError
	return errors.As(err, &se) && slices.ContainsFunc(codes, se.HasErrorCode)
}

// mayHaveHappened tells a write whose answer was lost, cut short or not acknowledged by a majority, from one that the
// server refused or never saw.
func mayHaveHappened(err error) bool {
	if err == nil {
		return false
	}
	if mongo.IsNetworkError(err) || mongo.IsTimeout(err) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		hasLabel(err, "UnknownTransactionCommitResult") {
		return true
	}
	var we mongo.WriteException
	if errors.As(err, &we) && we.WriteConcernError != nil {
		return true
	}
	var be mongo.BulkWriteException
	if errors.As(err, &be) && be.WriteConcernError != nil {
		return true
	}
	return hasCode(err, interruptedCodes...)
}

// worthRetrying tells a refusal that another attempt may get past: the primary has moved, or its cache was full.
func worthRetrying(err error) bool {
	if hasCode(err, notPrimaryCodes...) || hasCode(err, fullCodes...) {
		return true
	}
	// The driver's pool was closed before the command was sent.
	var pool interface {
		error
		Retryable() bool
	}
	if errors.As(err, &pool) && pool.Retryable() {
		return true
	}
	return hasLabel(err, "RetryableWriteError") || hasLabel(err, "TransientTransactionError")
}

// mayPass tells trouble with the server from its refusal.
func mayPass(err error) bool { return mayHaveHappened(err) || worthRetrying(err) }

func hasLabel(err error, label string) bool {
	var le mongo.LabeledError
	return errors.As(err, &le) && le.HasErrorLabel(label)
}

// tooLarge tells a write that the server refused because the document would outgrow 16 MiB.
func tooLarge(err error) bool {
	return hasCode(err, codeObjectTooLarge, codeResultTooLarge, codeUpdateTooLarge)
}
